"""`draftsmith compare` on a tiny target: what it trains, how it goes on after a kill, its page."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launched_here import launched_here
from tiny_llama import build_llama
from transformers import LlamaConfig, PreTrainedTokenizerFast

from draftsmith.decode.report import compared
from draftsmith.train import compare
from draftsmith.train.compare import RECIPES, KindsCompared, runs_of

Argv = list[str]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that are launched: each in this process."""
    return launched_here(monkeypatch, compare)


@pytest.fixture
def asked(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Argv:
    build_llama(len(tiny_tokenizer), layers=4, hidden=32, seed=0).save_pretrained(tmp_path / "of")
    tiny_tokenizer.save_pretrained(tmp_path / "of")
    rows = (" ".join(str(row * i) for i in range(60)) for row in range(80))
    lines = [{"text": f"row {row} {numbers}"} for row, numbers in enumerate(rows)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = [f"target={tmp_path / 'of'}", f"out={tmp_path / 'out'}", "temperatures=0", "limit=4"]
    said += [f"{key}={tmp_path / 'text.jsonl'}" for key in ("prompts", "data")]
    short = ["max_length=48", "batch_size=4", "max_new_tokens=8", "prompt_tokens=8", "budget=0.5"]
    return [*said, *short, "kinds=suffix+BEST,medusa,ngram"]


@pytest.mark.filterwarnings("ignore")
def test_killed_and_gone_on_with(
    asked: Argv,
    tmp_path: Path,
    launches: list[list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three kinds, killed after the first; the second time only the others are made, and all three
    are on the page, their figures in compare.json.
    """
    out, real = tmp_path / "out", compare.row_of

    def killed(settings: KindsCompared, kind: str, *more: Any) -> Any:
        if kind == "ngram":
            raise KeyboardInterrupt
        return real(settings, kind, *more)

    monkeypatch.setattr(compare, "row_of", killed)
    with pytest.raises(KeyboardInterrupt):
        compare.main(asked)
    assert [file.name for file in (out / "rows").iterdir()] == ["medusa.json"]
    first = (out / "rows" / "medusa.json").read_text()
    [words] = launches
    assert words[:2] == ["train", "heads"] and "seconds=0.5" in words

    monkeypatch.setattr(compare, "row_of", real)
    compare.main(asked)
    told = capsys.readouterr().out
    assert len(launches) == 1 and (out / "rows" / "medusa.json").read_text() == first
    assert "1 of 3: medusa, done" in told and "3 of 3: suffix+BEST\n" in told
    found = json.loads((out / "compare.json").read_text())
    assert [row["kind"] for row in found["rows"]] == ["medusa", "ngram", "suffix+medusa"]
    # What was timed before training says what each was to give by its tau, and is kept.
    if not torch.cuda.is_available():
        timed = json.loads((out / "rounds.json").read_text())
        assert [*timed] == ["medusa", "ngram"]
        for row in found["rows"][:2]:
            [one], grid = row["results"], timed[row["kind"]]
            cost_N = [
                sum(parts) for parts in zip(grid["verify"][0], grid["beside"][0], strict=True)
            ]
            cost = np.interp(1 + one["K"], grid["nodes"], cost_N) / cost_N[0]
            told_of = one["tau"] / cost if one["tree"] == "chain" and one["K"] else None
            assert one["foretold"] == (told_of and pytest.approx(told_of))
        assert found["rows"][2]["results"][0]["foretold"] is None
    medusa, ngram, both = found["rows"]
    took = medusa["training"]
    assert took["seconds"] >= 0.5 and took["steps"] and both["training"] == took
    assert medusa["bytes"] == both["bytes"] > 0 == ngram["bytes"] and ngram["training"] is None
    for row in found["rows"]:
        [result] = row["results"]
        same = result["identical"]
        assert same["same"] + same["excused"] == same["total"] == 4 and result["lossless"]
        assert (out / result["report"] / "report.json").exists()
    flat = json.loads((out / "results.json").read_text())
    assert [row["what"] for row in flat] == ["medusa", "ngram", "suffix+medusa"]
    assert flat[0]["training"] == took and flat[2]["policy"] == "auto"
    assert "auto" not in {
        row["policy"] for row in flat[:2]
    }  # which drafts nothing where that's best
    assert told.count(found["says"]) == 1 and "at temperature 0" in found["says"]
    page = (out / "compare.html").read_text()
    for says in ("medusa", "suffix+medusa", "tau by depth", "<script>", "Speed-up at temperature"):
        assert says in page
    with pytest.raises(ValueError, match=r"other settings \(settings.budget|begun with other"):
        compare.main([*asked, "budget=3"])


def test_the_budget_is_shared_by_both_runs_of_a_draft(asked: Argv, tmp_path: Path) -> None:
    settings = compare.parse(KindsCompared, [*asked, "budget=9", "more={draft: loss=fkl}"])
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=320, intermediate_size=256, **sizes)
    runs = list(runs_of(settings, "draft", "text", config))
    assert [(run.name, entry) for run, entry, _ in runs] == [
        ("draft-pretrained", "pretrain"),
        ("draft", "distill"),
    ]
    assert all("seconds=4.5" in words and "data=text" in words for *_, words in runs)
    assert f"draft.path={runs[0][0] / 'drafter'}" in runs[1][2] and "loss=fkl" in runs[1][2]
    assert list(runs_of(settings, "ngram", "text", config)) == []
    first, second, last = runs_of(settings, "pard", "text", config)
    assert [run.name for run, *_ in (first, second, last)] == [
        *("pard-pretrained", "pard-distilled", "pard")
    ]
    assert all("seconds=3.0" in words for *_, words in (first, second, last))
    assert "heldout.limit=0" in first[2] and "heldout.limit=16" in second[2]
    assert "model.layers=3" in first[2] and f"draft.path={first[0] / 'drafter'}" in second[2]
    assert {f"draft.path={second[0] / 'drafter'}", "pard.levels=5", "recipe=pard/gsm8k"} < {
        *last[2]
    }
    # A wide target's kinds learn at a lower rate, and every kind is among what is made by default.
    config.hidden_size = 1024
    [(_, entry, words)] = runs_of(settings, "eagle3", "text", config)
    assert entry == "eagle" and "lr=0.0025" in words
    every = compare.parse(KindsCompared, ["target=x"]).chosen(12)
    assert {*RECIPES, "ngram", "suffix", "recycling", "exit:4"} < set(every)
    assert every[-1] == "suffix+BEST"
    (plain := tmp_path / "lm").mkdir()  # a causal LM's own files, without any of ours
    named = f"rapid:128+{plain},suffix+tli:{plain},easy:2+some/hub,stand++draft,draft"
    chosen = compare.parse(KindsCompared, ["target=x", f"kinds={named}"]).chosen(12)
    assert {*chosen} == {*named.split(",")}
    for wrong in ("suffix+HEAD", "suffix+dradt", "BEST", "HEAD+draft"):
        with pytest.raises(ValueError, match="unknown kind"):
            compare.parse(KindsCompared, ["target=x", f"kinds=draft,{wrong}"]).chosen(12)


def test_what_does_not_fit_is_told(
    asked: Argv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that its plan refuses is a row with the reason; one that broke is tried again."""
    ends = {"eagle3": (2, "error: memory: got a run that needs 9 GiB"), "hydra": (1, "broken")}
    tried: list[str] = []

    def run(words: list[str]) -> tuple[int, str]:
        tried.append(Path(words[-1].removeprefix("out=")).name)
        return ends[tried[-1]]

    monkeypatch.setattr(compare, "run_as_user", run)
    for _ in range(2):
        compare.main([*asked, "kinds=eagle3,hydra"])
    assert tried == ["eagle3", "hydra", "hydra"]
    told = capsys.readouterr().out
    assert "no kind could be measured" in told
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "is not among them" in page and "memory: got a run that needs 9 GiB" in page


def row(kind: str, speedup: float, low: float, high: float, trained: bool = True) -> dict[str, Any]:
    result = {"temperature": 0.0, "speedup": speedup, "speedup_interval": [low, high]}
    training = {"seconds": 9.0, "tokens": 10, "steps": 3} if trained else None
    return {"kind": kind, "refused": "", "training": training, "results": [result]}


def test_the_answer_in_a_sentence() -> None:
    eagle, medusa = row("eagle3", 1.5, 1.4, 1.6), row("medusa", 1.2, 1.1, 1.3)
    near, free = row("hydra", 1.45, 1.3, 1.55), row("suffix", 1.7, 1.65, 1.8, trained=False)
    slow = row("eagle1", 0.9, 0.8, 1.0)
    assert compared.says([medusa, slow, eagle]).startswith("train eagle3: 1.50")
    assert "told apart" not in compared.says([medusa, eagle])
    assert compared.says([near, eagle, medusa]).endswith("not told apart from hydra")
    assert compared.says([eagle, free]).startswith("train nothing, draft with suffix")
    assert compared.says([slow]).startswith("drafting doesn't pay here: eagle1, the best")
    unsure = row("eagle1", 1.1, 0.9, 1.3)
    assert compared.says([unsure]).startswith("drafting doesn't pay here")
    alone = row("eagle1", 1.5, 1.4, 1.6)
    alone["results"][0]["speedup_interval"] = None  # of one batch
    assert compared.says([alone]).startswith("train eagle1: 1.50")


def test_tau_by_depth_is_that_of_the_kept_share() -> None:
    assert compared.by_depth({"accepted_histogram": [4, 2, 2]}) == [1.5, 1.75]
