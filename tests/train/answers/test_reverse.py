"""Answers that a draft can learn: their law, what no token of them breaks, the folder."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_drafts import save_draft
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.disk.provenance import provenance
from draftsmith.train.answers.reverse import TRIES, learnable
from draftsmith.train.prepare import main
from draftsmith.train.text.prepared import load_prepared, read_answers

DRAWN = SamplingParams(temperature=1.0)
NOTHING = 1e-30  # a least that no token is under


def walked(p: list[float], q: list[float], least: float, tries: int) -> list[float]:
    """The law by every sequence of tokens that the target may propose."""
    inside = [x for x in range(len(p)) if q[x] >= min(least, max(q))]
    law = [0.0] * len(p)
    for proposed in itertools.product(range(len(p)), repeat=tries):
        chance = float(torch.tensor([p[x] for x in proposed], dtype=torch.float64).prod())
        accepted = next((x for x in proposed if x in inside), None)
        if accepted is not None:
            law[accepted] += chance
        for x in inside if accepted is None else ():
            law[x] += chance * q[x] / sum(q[y] for y in inside)
    return law


@pytest.mark.parametrize("least", [NOTHING, 0.05, 0.2, 0.9])
def test_the_law_is_that_of_proposing_and_refusing(least: float) -> None:
    torch.manual_seed(0)
    twin = 0.0  # how far the law with one try fewer is
    for _ in range(3):
        p_logits, q_logits = torch.randn(2, 1, 4, dtype=torch.float64) * 2
        law = learnable(p_logits, q_logits, DRAWN, least).exp()[0]
        p, q = p_logits.softmax(-1)[0].tolist(), q_logits.softmax(-1)[0].tolist()
        wanted = torch.tensor(walked(p, q, least, TRIES), dtype=torch.float64)
        assert (law - wanted).abs().max() < 1e-12
        assert law.sum() == pytest.approx(1, abs=1e-12)
        fewer = torch.tensor(walked(p, q, least, TRIES - 1), dtype=torch.float64)
        twin = max(twin, float((law - fewer).abs().max()))
    assert (twin > 1e-6) == (least in (0.05, 0.2)), twin


def test_greedy_takes_the_targets_best_token_unless_it_is_refused() -> None:
    p_logits = torch.tensor([[3.0, 2.0, 0.0]]).log_softmax(-1)
    q_logits = torch.tensor([[0.05, 0.15, 0.8]]).log()
    for least, best in ((0.01, 0), (0.1, 2)):  # not the target's second: it proposes one alone
        assert learnable(p_logits, q_logits, SamplingParams(), least).argmax(-1).item() == best


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target: LlamaForCausalLM,
    tiny_draft: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Path:
    """A target, a draft, and prompts of unequal lengths."""
    folder = tmp_path_factory.mktemp("reverse")
    tiny_target.save_pretrained(folder / "target")
    tiny_tokenizer.save_pretrained(folder / "target")
    made = provenance([], 0, None, 0)
    save_draft(folder / "draft", tiny_draft, tiny_target, tiny_tokenizer, provenance=made)
    rows = [{"prompt": "def " + "f" * i + "(x):"} for i in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def prepared(pair: Path, out: Path, least: float, **changes: Any) -> list[dict[str, Any]]:
    settings = {"split": "all", "max_new_tokens": 16, "seed": 5, "device": "cpu", "batch_size": 4}
    settings |= {"reverse.draft": pair / "draft", "reverse.least": least} | changes
    given = [f"target={pair / 'target'}", f"prompts={pair / 'rows.jsonl'}", f"out={out}"]
    main(given + [f"{name}={value}" for name, value in settings.items()])
    return sorted(read_answers(out), key=lambda answer: answer["index"])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_nothing_is_refused_answers_are_the_targets_own(
    pair: Path, tmp_path: Path, temperature: float
) -> None:
    found = prepared(pair, tmp_path / "out", NOTHING, temperature=temperature)
    decoder = Decoder.from_pretrained(str(pair / "target"), dtype="float32")
    params = SamplingParams(temperature, max_new_tokens=16, seed=5)
    own = decoder.generate([answer["prompt_ids"] for answer in found], params)
    assert [answer["token_ids"] for answer in found] == [made.tokens for made in own]
    assert [answer["text"] for answer in found] == [made.text for made in own]


@torch.no_grad()
def test_no_token_is_less_probable_for_the_draft(
    pair: Path, tmp_path: Path, tiny_draft: LlamaForCausalLM
) -> None:
    """By passes of the draft over whole texts; the target alone breaks the bound."""
    least = 0.02

    def broken(answers: list[dict[str, Any]]) -> int:
        count = 0
        for answer in answers:
            ids = answer["prompt_ids"] + answer["token_ids"]
            q_TV = tiny_draft(torch.tensor([ids])).logits[0].softmax(-1)
            for at in range(len(answer["prompt_ids"]), len(ids)):
                count += bool(q_TV[at - 1, ids[at]] < min(least, q_TV[at - 1].max()) - 1e-6)
        return count

    bound = prepared(pair, tmp_path / "bound", least)
    free = prepared(pair, tmp_path / "free", NOTHING)
    assert not broken(bound) and broken(free)
    assert len(load_prepared(tmp_path / "bound")) == 6


def test_a_cut_run_goes_on_and_another_bound_is_another_folder(pair: Path, tmp_path: Path) -> None:
    whole = prepared(pair, tmp_path, 0.02)
    (shard,) = tmp_path.glob("answers-*.jsonl")
    lines = shard.read_bytes().splitlines(keepends=True)
    shard.write_bytes(b"".join(lines[:2]) + lines[2][:-9])
    assert prepared(pair, tmp_path, 0.02, batch_size=3) == whole
    with pytest.raises(ValueError, match=r"begun with other settings .reverse.least: 0.02 there"):
        prepared(pair, tmp_path, 0.03)
    with pytest.raises(ValueError, match=r"begun with other settings .reverse"):
        prepared(pair, tmp_path, 0.02, **{"reverse.draft": ""})


def test_a_server_cannot_take_part(pair: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"reverse.draft: got .* with endpoint.url"):
        prepared(pair, tmp_path, 0.02, **{"endpoint.url": "http://localhost:1"})
