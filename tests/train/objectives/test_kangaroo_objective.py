"""Kangaroo's loss against its formula, position by position; the whole text of a run."""

import json
from pathlib import Path

import pytest
import torch
from tiny_heads import TOKENS, llama, one_batch, words
from tiny_hydra import layer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.heads.kangaroo import Kangaroo
from draftsmith.models.layers.layer import causal
from draftsmith.models.taps import target_states
from draftsmith.train import heads
from draftsmith.train.losses.pure import forward_kl
from draftsmith.train.objectives.heads import trained_pairs
from draftsmith.train.objectives.kangaroo import KangarooObjective
from draftsmith.train.teachers.states import OnlineTaps
from draftsmith.train.text.batches import Batch


def objective(target: PreTrainedModel) -> KangarooObjective:
    torch.manual_seed(1)
    head = Kangaroo(layer(vocab_size=len(target.lm_head.weight)), 1).init_from(target)  # type: ignore[arg-type, union-attr]
    given = (head, target, words(TOKENS), OnlineTaps(target, head.taps))
    return KangarooObjective(*given, loss="fkl", decay=1.0)


def documents(batch: Batch) -> list[tuple[int, int, int]]:
    """(row, first, end) of each document of a batch."""
    found = []
    for row, positions in enumerate(batch.position_ids.tolist()):
        starts = [i for i, at in enumerate(positions) if at == 0]
        found += [(row, a, b) for a, b in zip(starts, [*starts[1:], len(positions)], strict=True)]
    return found


@torch.no_grad()
def obvious(made: KangarooObjective, target: PreTrainedModel, batch: Batch, shift: int) -> Tensor:
    """Document by document; shift: how much later the target is looked at, 0 is right."""
    total = torch.zeros(())
    for row, first, end in documents(batch):
        ids_1T = batch.input_ids[row : row + 1, first:end]
        seen = target_states(target, made.head.taps, input_ids=ids_1T)
        at_1T = torch.arange(end - first)[None]
        state_1TH = made.head.adapted(seen.taps_BTF, at_1T, causal())
        head_VH = made.head.head_VH(0)[:TOKENS]
        for t in range(end - first - shift):
            if batch.loss_mask[row, first + t]:
                p, q = seen.norm_BTG[0, t + shift] @ head_VH.T, state_1TH[0, t] @ head_VH.T
                total = total + forward_kl(p[None], q[None])[0]
    return total


@pytest.mark.parametrize("packing", [True, False])
def test_loss_is_the_formula(packing: bool) -> None:
    """And the twin that looks one token further on, as other heads do, is told apart."""
    target, batch = llama(), one_batch(packing)
    made = objective(target)
    out = made(batch)
    wanted = obvious(made, target, batch, 0)
    assert float(out.loss.detach()) == pytest.approx(float(wanted), rel=1e-4)
    assert float(obvious(made, target, batch, 1)) != pytest.approx(float(wanted), rel=1e-2)
    assert out.metrics["count_0"] == out.tokens == batch.loss_mask.sum()
    scored = made.measure(batch)
    assert float(scored.loss) == pytest.approx(float(wanted), rel=1e-4)
    assert 0 < float(scored.metrics["alpha_0"]) < float(scored.metrics["count_0"])


def test_all_of_the_adapter_learns_and_nothing_else() -> None:
    target = llama()
    made = objective(target)
    made(one_batch(True)).loss.backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.any()), name
    assert not any(p.grad is not None for p in target.parameters())


def test_every_trained_token_has_a_pair_at_depth_minus_one() -> None:
    batch = one_batch(True)
    assert torch.equal(trained_pairs(batch, -1), batch.loss_mask)


def test_training_helps_and_the_folder_decodes(
    tmp_path: Path, tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """alpha grows above the raw exit's, which it begins near; what is saved is lossless."""
    for part in (tiny_target, tiny_tokenizer):
        part.save_pretrained(tmp_path / "of")
    lines = [
        {"text": f"row {row} " + " ".join(str(row * i) for i in range(30))} for row in range(60)
    ]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    heads.main(
        [
            *(f"target.path={tmp_path / 'of'}", f"data={tmp_path / 'text.jsonl'}"),
            *(f"out={tmp_path / 'run'}", "head.kind=kangaroo", "head.early=2", "loss=fkl", "K=3"),
            *("text.max_length=40", "heldout={limit: 4, prompt_tokens: 8, max_new_tokens: 12}"),
            *("steps=40", "lr=0.01", "eval_every=20", "batch_size=4", "save_dtype=float32"),
            *("dtype=float32", "temperature=0"),
        ]
    )
    log = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    log = [record for record in log if "eval_tau" in record]
    assert log[-1]["eval_loss"] < 0.9 * log[0]["eval_loss"]
    assert log[-1]["eval_alpha_0"] > log[0]["eval_alpha_0"] + 0.01
    same = sum(log[-1]["eval_top1_0"] ** kept for kept in range(4))  # each depth is like the first
    assert log[-1]["eval_tau_estimate"] == pytest.approx(same)
    params, prompts = SamplingParams(max_new_tokens=12), ["row 3 0 3 6", "row 20 0 20"]
    plain = Decoder.from_pretrained(str(tmp_path / "of"), dtype="float32")
    own = Decoder.from_pretrained(
        str(tmp_path / "of"), str(tmp_path / "run/drafter"), dtype="float32", K=3
    )
    answers = [[c.tokens for c in d.generate(prompts, params)] for d in (plain, own)]
    assert answers[0] == answers[1]


def test_options_of_others_are_refused(tmp_path: Path) -> None:
    given = ["target.path=of", "target.shrink=true", f"out={tmp_path / 'run'}"]
    with pytest.raises(ValueError, match=r"got head.early with head.kind=medusa"):
        heads.main([*given, "head.kind=medusa", "head.early=3", "steps=1"])
    with pytest.raises(ValueError, match=r"got the target's first 0 layers"):
        heads.main(
            [*given, f"out={tmp_path / 'two'}", "head.kind=kangaroo", "head.early=0", "steps=1"]
        )
