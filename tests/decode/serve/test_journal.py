"""What a server says of its work while it works: the log's lines, `/live`, the page."""

import itertools
import logging
import re
import threading
from pathlib import Path

import pytest
from live_server import LONG, live
from saved_drafts import save_draft
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.decode.engine.session import News


def test_the_log_and_the_live_numbers_add_up_to_the_answers(
    tmp_path: Path,
    tiny_target: LlamaForCausalLM,
    tiny_draft: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = save_draft(tmp_path / "draft", tiny_draft, tiny_target, tiny_tokenizer)
    caplog.set_level(logging.INFO, "draftsmith")
    how = {"drafter": str(folder), "drafters": ("plain=none", "idle=ngram"), "log_s": 0.02, "K": 2}
    held, go_on, steps = threading.Event(), threading.Event(), itertools.count()
    with live(tiny_target, tiny_tokenizer, **how) as made:
        step = made.lane.session.step

        def holding() -> list[News]:
            if next(steps) == 12:
                held.set()
                assert go_on.wait(600)
            return step()

        monkeypatch.setattr(made.lane.session, "step", holding)
        asking = threading.Thread(target=lambda: made.post(LONG | {"n": 2}))
        asking.start()
        assert held.wait(600)
        halfway = made.http.get("/live").json()["lanes"][0]
        go_on.set()
        asking.join()
        made.post({"model": "tiny:plain", "prompt": [5], "max_tokens": 7, "ignore_eos": True})
        first, plain, idle = made.http.get("/live").json()["lanes"]
        counts = made.counts()
    assert (halfway["answers"], halfway["running"]) == (0, 2), "not while it decodes"
    assert halfway["tokens"] == halfway["emitted"] + 2 < first["tokens"]
    assert (first["answers"], first["tokens"], first["running"]) == (2, 900, 0)
    assert first["emitted"] == 900 - 2  # the prompts' passes gave the first ones
    assert first["accepted"] == sum(first["accepted_at"])
    spec = "vllm:spec_decode_num"
    assert first["accepted"] == counts[f"{spec}_accepted_tokens_total"]
    assert first["drafted"] == counts[f"{spec}_draft_tokens_total"]
    assert first["draft"] == {"tag": "default", "kind": "lm", "version": 0}
    assert (plain["tokens"], plain["drafted"], plain["draft"]["kind"]) == (7, 0, None)
    assert (idle["tokens"], idle["rounds"]) == (0, 0)

    lines = [record.getMessage() for record in caplog.records if record.name == "draftsmith"]
    ours = [line for line in lines if line.startswith("tiny: ")]
    assert len(ours) > 1 and not [line for line in lines if line.startswith("tiny:idle")]
    assert sum(int(line.split()[1]) for line in ours) == 900
    assert sum(int(re.search(r"(\d+) answers ended", line)[1]) for line in ours) == 2
    drafting = [line for line in ours if "drafted" in line]
    assert (
        sum(int(re.search(r"of (\d+) drafted", line)[1]) for line in drafting) == first["drafted"]
    )
    assert all(1 <= float(re.search(r"tau ([\d.]+)", line)[1]) <= 3 for line in drafting)
    others = [line for line in lines if line.startswith("tiny:plain: ")]
    assert sum(int(line.split()[1]) for line in others) == 7
    assert "1 answers ended, 0 run, 0 wait" in others[-1]
    assert not [line for line in others if "tau" in line]


def test_nothing_is_logged_where_nothing_is_wanted(
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "draftsmith")
    with live(tiny_target, tiny_tokenizer, log_s=0) as made:
        made.post(LONG | {"max_tokens": 5})
    assert [record for record in caplog.records if record.name == "draftsmith"] == []


def test_the_page_stands_alone_and_holds_no_data(
    tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    with live(tiny_target, tiny_tokenizer, api_key="k") as made:
        page = made.http.get("/")
        assert page.status_code == 200 and page.headers["Content-Type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        assert not re.findall(r"""(?:src|href|url|import)\s*[=(]\s*['"]?\s*\w""", page.text)
        named = {*re.findall(r"https?://[a-z0-9./]+", page.text)}
        assert named == {"http://www.w3.org/2000/svg"}, "it loads something"
        asked = re.search(r'fetch\("(\w+)"', page.text)[1]
        assert made.http.get(f"/{asked}").status_code == 401
        told = made.http.get(f"/{asked}", headers={"Authorization": "Bearer k"}).json()
        lane = told["lanes"][0]
        assert told["state"] == "ok"
        # What the script reads is what it is told.
        read = set(re.findall(r"\b(?:lane|now|one|first)\.([a-z_]+)\b", page.text))
        read |= set(re.findall(r'past\("(\w+)"\)', page.text))
        assert read - {"time"} <= lane.keys() and "accepted_at" in read
