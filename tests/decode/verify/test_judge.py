"""Judge decoding: the mask in the decoder against a slow loop, labels against a slow miner, what is
refused, the arithmetic task, and the page.
"""

import json
import re
import xml.etree.ElementTree as ET
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_drafts import save_draft
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.bench.evidence import judge_page
from draftsmith.command import guarded
from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.evaluate.answers import final_number
from draftsmith.decode.prompts.arithmetic import LARGEST, SLOTS, arithmetic_rows
from draftsmith.decode.prompts.prompts import prompt_ids
from draftsmith.decode.prompts.rows import Row
from draftsmith.decode.prompts.rows import parse as parse_row
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.traces import judge_labels
from draftsmith.decode.traces.store import read_traces
from draftsmith.decode.verify.lossy import parse
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.scorers import Scorer, ScorerConfig, save_scorer

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = [[5, 9, 12, 40], [7, 7, 30], [100, 3, 8, 8, 61, 2], [44, 210]]
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)
Pair = tuple[PreTrainedModel, PreTrainedTokenizerFast, LMDrafter]


@pytest.fixture
def pair(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_draft: PreTrainedModel,
) -> Pair:
    return tiny_target, tiny_tokenizer, LMDrafter(tiny_draft, len(tiny_tokenizer))


def judge_folder(folder: Path, pair: Pair, bias: float = 0.0, **changes: Any) -> Path:
    """A judge with random weights, whose bias lets all pass, none, or some."""
    torch.manual_seed(3)
    scorer = Scorer(ScorerConfig("judge", changes.pop("hidden", 32), blocks=0))
    with torch.no_grad():
        scorer.out.weight.mul_(8.0)
        scorer.out.bias.fill_(bias)
        scorer.shift.fill_(0.2)
    figures = {"brier": 0.21, "brier_constant": 0.25}
    about = {"made_for": fingerprint(pair[0], pair[1]), "threshold": 0.5, "calibrated": True}
    save_scorer(folder, scorer, about | {"figures": figures, "provenance": {}} | changes)
    return folder


@torch.no_grad()
def slow(pair: Pair, scorer: Scorer, threshold: float, prompt: list[int], K: int) -> list[int]:
    """Judge decoding in plain words: no cache, no batch, one token at a time."""
    target, _, drafter = pair
    model = drafter.runner.model

    def best(lm: PreTrainedModel, ids: list[int]) -> int:
        return int(lm(torch.tensor([ids])).logits[0, -1].argmax())

    ids = [*prompt, best(target, prompt)]
    while len(ids) - len(prompt) < 12:
        start = len(ids)
        drafted = list(ids)
        for _ in range(K):
            drafted.append(best(model, drafted))
        for token in drafted[start:]:
            state_H = target.model(torch.tensor([[*ids, token]])).last_hidden_state[0, -1]
            chance = torch.sigmoid(scorer.calibrated(scorer(state_H)))
            if token != best(target, ids) and chance <= threshold:
                break
            ids.append(token)
        ids.append(best(target, ids))
    return ids[len(prompt) :][:12]


def decoded(pair: Pair, **settings: Any) -> list[list[int]]:
    target, tokenizer, drafter = pair
    decoder = Decoder(target, tokenizer, drafter, batch_size=3, **settings)
    return [made.tokens for made in decoder.generate(PROMPTS, GREEDY)]


def test_a_chain_keeps_what_the_slow_loop_keeps(pair: Pair, tmp_path: Path) -> None:
    folder = judge_folder(tmp_path / "judge", pair)
    plain = decoded(pair, K=3)
    for threshold in (0.3, 0.6):
        lossy = parse(f"judge:{folder},{threshold}").ready(pair[0], pair[1])
        assert lossy.judge is not None
        expected = [slow(pair, lossy.judge.scorer, threshold, prompt, 3) for prompt in PROMPTS[:2]]
        found = decoded(pair, K=3, lossy=f"judge:{folder},{threshold}", allow_lossy=True)
        assert found[:2] == expected
        assert found != plain  # or the judge had nothing to say
    own = decoded(pair, K=3, lossy=f"judge:{folder}", allow_lossy=True)
    assert own == decoded(pair, K=3, lossy=f"judge:{folder},0.5", allow_lossy=True)


@pytest.mark.parametrize("tree", ["chain", "medusa-63", "dynamic:3,2,10"])
def test_one_that_passes_nothing_is_lossless_and_one_that_passes_all_keeps_whole_paths(
    tree: str, pair: Pair, tmp_path: Path
) -> None:
    plain = decoded(pair)
    none = judge_folder(tmp_path / "none", pair, bias=-1e4)
    assert decoded(pair, K=3, tree=tree, lossy=f"judge:{none}", allow_lossy=True) == plain
    every = judge_folder(tmp_path / "all", pair, bias=1e4)
    decoder = Decoder(*pair, K=3, tree=tree, lossy=f"judge:{every}", allow_lossy=True)
    made = decoder.generate(PROMPTS[:1], GREEDY)[0]
    rounds = made.counters.histogram
    assert sum(rounds[:-1]) <= 1  # all but a cut last round keep K tokens
    assert made.tokens != plain[0]


def test_the_mask_reads_the_state_at_each_node_itself(pair: Pair, tmp_path: Path) -> None:
    folder = judge_folder(tmp_path / "judge", pair)
    lossy = parse(f"judge:{folder},0.7").ready(pair[0], pair[1])
    assert lossy.judge is not None
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    mask = lossy.judge.mask(states)
    scorer = lossy.judge.scorer
    for row in range(2):
        for node in range(5):
            logit = states[row, node] @ scorer.out.weight[0] + scorer.out.bias
            assert bool(mask[row, node]) == bool(torch.sigmoid(logit[0] + 0.2) > 0.7)
    assert 0 < int(mask.sum()) < 10


def test_what_is_refused(pair: Pair, tmp_path: Path, tiny_draft: PreTrainedModel) -> None:
    folder = judge_folder(tmp_path / "judge", pair)
    for text in ("judge", "judge:", f"judge:{folder},0", f"judge:{folder},1", "judge:x,1.5"):
        with pytest.raises(ValueError, match=r"judge:FOLDER|between 0 and 1"):
            parse(text)
    assert parse("judge:a,b").folder == "a,b"  # a comma in a name is no threshold
    assert str(parse("judge:a,b,0.25")) == "judge:a,b,0.25"
    with pytest.raises(ValueError, match="allow_lossy=true"):
        Decoder(*pair, lossy=f"judge:{folder}")
    with pytest.raises(ValueError, match=r"without config\.json"):
        Decoder(*pair, lossy=f"judge:{tmp_path / 'none'}", allow_lossy=True)
    with pytest.raises(ValueError, match="got one for another target"):
        Decoder(tiny_draft, pair[1], pair[2], lossy=f"judge:{folder}", allow_lossy=True)
    wide = judge_folder(tmp_path / "wide", pair, hidden=48)
    with pytest.raises(ValueError, match="states of 48, expected 32"):
        Decoder(*pair, lossy=f"judge:{wide}", allow_lossy=True)
    rough = judge_folder(tmp_path / "rough", pair, calibrated=False)
    with pytest.warns(UserWarning, match=r"isn't calibrated: Brier score 0\.2100"):
        Decoder(*pair, lossy=f"judge:{rough}", allow_lossy=True)


# ---- labels ---------------------------------------------------------------------------------


def fine(tokens: list[int]) -> bool:
    """What stands for a right answer where models are random."""
    return sum(tokens) % 3 != 0


@torch.no_grad()
def slow_labels(pair: Pair, prompt: list[int], most: int) -> list[tuple[int, int, bool]]:
    target, _, drafter = pair

    def finished(tokens: list[int]) -> list[int]:
        while len(tokens) < most and (not tokens or tokens[-1] != 0):
            logits = target(torch.tensor([prompt + tokens])).logits
            tokens = [*tokens, int(logits[0, -1].argmax())]
        return tokens

    answer, rows, at = finished([]), [], 0
    if not fine(answer):
        return []
    while at < min(len(answer), most):
        text = torch.tensor([prompt + answer[:at]])
        token = int(drafter.runner.model(text).logits[0, -1].argmax())
        if token != answer[at]:
            changed = finished([*answer[:at], token])
            rows.append((len(prompt) + at, token, fine(changed)))
            answer = changed if fine(changed) else answer
        at += 1
    return rows


def test_labels_are_those_of_the_slow_miner(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    target, tokenizer, drafter = pair
    monkeypatch.setattr(judge_labels.Miner, "ends_in", lambda self, tokens, right: fine(tokens))
    monkeypatch.setattr(judge_labels, "prompt_ids", lambda row, tokenizer: PROMPTS[int(row.prompt)])
    miner = judge_labels.Miner(target, tokenizer, drafter, batch_size=3, max_new_tokens=7)
    asked = [(i, Row("question", "here", str(i), "#### 1")) for i in range(4)]
    found = dict(miner.mine(asked))
    assert list(found) == [0, 1, 2, 3]
    expected = [slow_labels(pair, prompt, 7) for prompt in PROMPTS]
    assert any(expected) and not all(expected), "expected prompts with and without labels"
    kinds = {row[2] for rows in expected for row in rows}
    assert kinds == {True, False}
    for columns, rows in zip(found.values(), expected, strict=True):
        named = (columns[name].tolist() for name in ("position", "token", "kept") if rows)
        assert list(zip(*named, strict=True)) == rows


def test_a_state_is_the_targets_at_the_drafts_token(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first label of an answer stands after the target's own beginning."""
    target, tokenizer, drafter = pair
    monkeypatch.setattr(judge_labels.Miner, "ends_in", lambda self, tokens, right: True)
    monkeypatch.setattr(judge_labels, "prompt_ids", lambda row, tokenizer: PROMPTS[0])
    miner = judge_labels.Miner(target, tokenizer, drafter, batch_size=2, max_new_tokens=6)
    ((_, columns),) = miner.mine([(0, Row("question", "here", "q", "#### 1"))])
    first, token = int(columns["position"][0]), int(columns["token"][0])
    with torch.no_grad():
        own = target.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=8, do_sample=False)[0]
        text = torch.tensor([[*own[:first].tolist(), token]])
        state_H = target.model(text).last_hidden_state[0, -1]
    assert columns["target_state"].dtype == torch.bfloat16
    torch.testing.assert_close(columns["target_state"][0].float(), state_H, atol=0.02, rtol=0.01)


def test_marked_answers_become_rows(pair: Pair) -> None:
    target, tokenizer, _ = pair
    text = "5 and 4 make 8, so the rest is 3."
    right = parse_row({"question": "What?", "answer": text}, "here")
    wrong = parse_row({"question": "What?", "answer": text, "error": [13, 14]}, "here")
    rows = dict(judge_labels.labelled(target, tokenizer, [(0, right), (1, wrong)]))
    assert rows[0]["kept"].all()
    assert tokenizer.decode(rows[0]["token"]) == text
    kept, tokens = rows[1]["kept"].tolist(), rows[1]["token"]
    last = kept.index(False)
    assert not any(kept[last:]) and last > 0
    assert tokenizer.decode(tokens) == text[:14]  # what follows from the error is left out
    assert "8" in tokenizer.decode(tokens[last:])
    assert "8" not in tokenizer.decode(tokens[:last])
    ids = [*prompt_ids(right, tokenizer), *rows[0]["token"].tolist()]
    assert rows[0]["position"].tolist() == list(range(len(ids)))[-len(rows[0]["token"]) :]
    with torch.no_grad():
        states_TH = target.model(torch.tensor([ids])).last_hidden_state[0]
    states_TH = states_TH[-len(rows[0]["token"]) :].bfloat16()
    assert torch.equal(rows[0]["target_state"], states_TH)
    for error in ([3, 2], [0, 99], "8", [1.5, 2]):
        with pytest.raises(ValueError, match=r"here: 'error' is .*expected \[first, end\]"):
            parse_row({"question": "What?", "answer": text, "error": error}, "here")


def test_the_command_goes_on_where_it_was_stopped(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, tokenizer, drafter = pair
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    save_draft(tmp_path / "draft", drafter.runner.model, target, tokenizer)
    data = tmp_path / "data.jsonl"
    asked = [{"question": f"What is {i} and {i}?", "answer": f"#### {2 * i}"} for i in range(310)]
    data.write_text("".join(json.dumps(row) + "\n" for row in asked))
    monkeypatch.setattr(judge_labels.Miner, "ends_in", lambda self, tokens, right: fine(tokens))
    common = [f"target={tmp_path / 'target'}", "dtype=float32", "max_new_tokens=6", "batch_size=2"]
    mine = [*common, f"drafter={tmp_path / 'draft'}", f"data={data}"]
    for limits, out in (((2, 5), "parts"), ((5,), "whole")):
        for limit in limits:
            judge_labels.main([*mine, f"out={tmp_path / out}", f"limit={limit}"])
    parts, whole = (read_traces(tmp_path / name, kind="judge") for name in ("parts", "whole"))
    assert parts.about == whole.about
    for name, column in whole.columns.items():
        torch.testing.assert_close(parts.columns[name], column)
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"{int(whole.columns['kept'].sum())} do no harm" in said
    assert guarded(judge_labels.main, [*common, f"out={tmp_path / 'x'}"]) == 2
    assert "expected data=... with drafter=..., or marked=... alone" in capsys.readouterr().err


# ---- the task, and the page -----------------------------------------------------------------


def test_arithmetic_is_right_and_the_same_each_time() -> None:
    rows = arithmetic_rows(0, 400)
    assert rows == arithmetic_rows(0, 400)
    assert rows[7:9] == arithmetic_rows(7, 2)
    assert len({row.prompt for row in arithmetic_rows(0, 3000)}) > 2990
    for row in rows:
        sums = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", row.completion)
        assert 2 <= len(sums) <= 4
        has = int(re.findall(r"\d+", row.prompt)[0])
        for a, sign, b, result in sums:
            assert has in (int(a), int(b))
            has = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
            assert has == int(result) <= LARGEST
        assert final_number(row.completion) == Decimal(has)
    said = " ".join(row.completion for row in rows)
    choices = [c for name in ("start", "next", "tail") for c in SLOTS[name] if c.strip()]
    assert all(choice.strip() in said for choice in choices)


def run_row(what: str, setting: float | None, seed: int, right: str, emitted: int) -> Any:
    """A run of ten questions, four rounds each."""
    each = {"right": right, "emitted": [emitted] * 10, "rounds": [4] * 10}
    accuracy, tau = right.count("1") / 10, emitted / 4
    row = {"what": what, "setting": setting, "seed": seed, "each": each, "tau": tau, "K": 8}
    row |= {"accuracy": accuracy, "accuracy_interval": [0, 1], "tau_interval": [tau, tau]}
    row |= {"target": "t", "drafter": "d", "data": "a", "temperature": 0.0, "n_prompts": 10}
    row |= {"auc": 0.9} if what == "judge" else {}
    return row | {"commit": "c", "command": "python bench/evidence/judge.py", "machine": "m"}


def test_the_page_compares_at_equal_tau(tmp_path: Path) -> None:
    rows = [run_row("lossless", None, 0, "1111111111", 8)]
    for what, right in (("lenience", "1111100000"), ("fuzzy", "1111111111"), ("typical", "0" * 10)):
        rows.append(run_row(what, 0.5, 0, right, 16))
    rows += [run_row("judge", 0.5, seed, "1111100000", 16) for seed in (0, 1)]
    module = judge_page
    module.publish(rows, tmp_path)
    written = json.loads((tmp_path / "judge.json").read_text())
    assert not any("each" in row for row in written)
    half = {
        row["peer"]: row
        for row in written
        if row["what"] == "at equal tau" and abs(row["tau"] - 3.2) < 1e-9
    }
    # 0.6 of the way from (2, 100 %) to (4, 50 %).
    assert half["lenience"]["accuracy"] == pytest.approx(0.7)
    assert half["lenience"]["difference_interval"] == [0.0, 0.0]
    assert half["fuzzy"]["difference"] == pytest.approx(-0.3)
    assert half["typical"]["peer_accuracy"] == pytest.approx(0.4)
    assert half["typical"]["difference_interval"][0] > 0
    text = (tmp_path / "judge.md").read_text()
    assert "| 3.20 | 70.0 | 70.0; +0.0 [+0.0, +0.0] |" in text
    assert "| judge | threshold = 0.5 | 4.00 ± 0.00 | 50.0 ± 0.0 |" in text
    drawn = ET.fromstring((tmp_path / "judge.svg").read_text())
    dots = drawn.findall(".//{http://www.w3.org/2000/svg}use")
    assert len(dots) == 5
    # An even axis: lossless at tau 2 stands left of the others at 4, and higher than their 50 %.
    places = {float(dot.attrib["x"]) for dot in dots}
    assert len(places) == 2
