"""An acceptance head that is trained with its draft: its loss against the obvious form, what it
does to the draft, a run that is interrupted, bad input. All in one process.
"""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from four_steps import four_steps, some_batch
from head_folders import made
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import save_drafter
from draftsmith.models.scorers import Scorer, ScorerConfig, load_acceptance
from draftsmith.train import distill
from draftsmith.train.objectives.distillation import Distillation, hidden_and_head
from draftsmith.train.scoring.calibration import auc
from draftsmith.train.scoring.joint import NUMBERS, AcceptanceLoss
from draftsmith.train.teachers.teachers import StateTeacher
from draftsmith.train.text.batches import Batch, Batches

Argv = list[str]
WARP = SamplingParams(temperature=0.7, top_k=50)


@pytest.fixture
def joint(
    tmp_path: Path, tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> Argv:
    tiny_target.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    lines = [f"row {row} " + " ".join(str(row * i) for i in range(40)) for row in range(200)]
    rows = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    (tmp_path / "text.jsonl").write_text(rows)
    argv = [
        "draft={hidden: 32, heads: 2, kv_heads: 1, intermediate: 64}",
        "dtype=float32",
        "lr=0.01",
    ]
    argv += ["text.max_length=40", "heldout={limit: 2, prompt_tokens: 8, max_new_tokens: 8}"]
    argv += [f"target.path={tmp_path / 'target'}", f"data={tmp_path / 'text.jsonl'}"]
    return [*argv, f"out={tmp_path / 'run'}", "batch_size=8", "head.weight=1", "head.limit=40"]


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def head_for(draft: PreTrainedModel, scalars: tuple[str, ...] = NUMBERS) -> Scorer:
    torch.manual_seed(7)
    hidden = draft.config.hidden_size
    return Scorer(ScorerConfig("acceptance", hidden, 2, 16, scalars, "parent"))


def objective(
    target: PreTrainedModel, draft: PreTrainedModel, head: AcceptanceLoss | None, loss: str = "fkl"
) -> Distillation:
    vocabulary = target.config.vocab_size
    options: dict[str, Any] = {"vocab_size": vocabulary, "warp": WARP, "head": head}
    teacher = StateTeacher(target, vocabulary)
    return Distillation(draft, teacher, four_steps(name=loss), **options).train()


def random_batch(seed: int, rows: int = 8, width: int = 24) -> Batch:
    """Every second row is of even tokens alone, the others of odd ones."""
    draw = torch.Generator().manual_seed(seed)
    ids = 2 * torch.randint(1, 21, (rows, width), generator=draw) + torch.arange(rows)[:, None] % 2
    mask = torch.ones(rows, width, dtype=torch.bool)
    return Batch(ids, torch.arange(width).expand(rows, -1), mask, None, tuple(range(rows)))


def logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """[K, V] of the trained positions, transformed."""
    found = model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits
    return WARP.transform(found[batch.loss_mask].float())


@torch.no_grad()
def test_drawn_tokens_their_numbers_and_chances(
    tiny_target: PreTrainedModel, tiny_draft: PreTrainedModel
) -> None:
    batch = some_batch(rows=6)
    head = AcceptanceLoss(head_for(tiny_draft), weight=1.0)
    whole = objective(tiny_target, tiny_draft, head)
    p_KV, q_KV = (logits(model, batch).softmax(-1) for model in (tiny_target, tiny_draft))
    places = torch.arange(len(q_KV))
    counts_KV, chances = torch.zeros_like(q_KV), []
    rows, q = whole._teacher(batch), hidden_and_head(tiny_draft, batch, whole.vocab_size)
    torch.manual_seed(0)
    for _ in range(300):
        state_KH, scalars_K3, chance_K = head.examples(
            rows, q, batch.loss_mask.flatten(), WARP.transform
        )
        assert scalars_K3 is not None
        # Which token it was is known by its probability.
        token_K = (q_KV - scalars_K3[:, :1].exp()).abs().argmin(-1)
        torch.testing.assert_close(q_KV[places, token_K].log(), scalars_K3[:, 0])
        ratio_K = p_KV[places, token_K] / q_KV[places, token_K]
        torch.testing.assert_close(chance_K, ratio_K.clamp(max=1.0), rtol=1e-4, atol=1e-5)
        assert bool((scalars_K3[:, 2] > 0).all())
        counts_KV[places, token_K] += 1
        chances.append(chance_K)
    torch.testing.assert_close(scalars_K3[:, 1], torch.special.entr(q_KV).sum(-1))
    assert torch.equal(state_KH, q[0][batch.loss_mask.flatten()])
    # Drawn from q: its likeliest tokens as often as they should be, and alpha the mean chance.
    top_K = q_KV.argmax(-1)
    rate_K, due_K = counts_KV[places, top_K] / 300, q_KV[places, top_K]
    deviation = float((due_K * (1 - due_K) / 300).sum().sqrt())
    assert abs(float((rate_K - due_K).sum())) < 4 * deviation
    alpha = float(torch.minimum(p_KV, q_KV).sum(-1).mean())
    chance_NK = torch.stack(chances)
    error = float((chance_NK.var(0) / 300).sum().sqrt()) / len(places)
    assert abs(float(chance_NK.mean()) - alpha) < 4 * error


@pytest.mark.parametrize("loss", ["fkl", "ce"])
def test_the_heads_loss_and_what_it_does_to_the_draft(
    tiny_target: PreTrainedModel, tiny_draft: PreTrainedModel, loss: str
) -> None:
    batch = some_batch()
    parameters = list(tiny_draft.parameters())
    plain = objective(tiny_target, tiny_draft, None, loss)(batch)
    alone = torch.autograd.grad(plain.loss, parameters)
    head = AcceptanceLoss(head_for(tiny_draft), weight=0.5)
    whole = objective(tiny_target, tiny_draft, head, loss)
    torch.manual_seed(3)
    both = whole(batch)
    got = torch.autograd.grad(both.loss, [*parameters, *head.parameters()])

    torch.manual_seed(3)
    rows, q = whole._teacher(batch), hidden_and_head(tiny_draft, batch, whole.vocab_size)
    state_KH, scalars_K3, chance_K = head.examples(
        rows, q, batch.loss_mask.flatten(), WARP.transform
    )
    logit_K = head.scorer(state_KH, scalars_K3)
    entropy = F.binary_cross_entropy_with_logits(logit_K, chance_K, reduction="sum")
    assert float(both.metrics["head"]) == pytest.approx(entropy.item(), rel=1e-5)
    expected = (plain.loss + 0.5 * entropy).item()
    assert both.loss.item() == pytest.approx(expected, rel=1e-6)
    of_head = torch.autograd.grad(0.5 * entropy, [*head.parameters()])
    assert all(map(torch.equal, got, alone)), "none of it reaches the draft"
    for one, extra in zip(got[len(alone) :], of_head, strict=True):
        torch.testing.assert_close(one, extra, rtol=1e-4, atol=1e-6)
    # One that trains nothing still takes part, as all processes of a step must.
    batch.loss_mask[:] = False
    nothing = whole(batch).loss
    assert nothing.item() == 0 and nothing.requires_grad
    batch = some_batch()
    whole.eval()
    assert (
        whole.measure(batch).loss
        == objective(tiny_target, tiny_draft, None, loss).measure(batch).loss
    )


def test_a_head_learns_beside_its_draft(tiny_target: PreTrainedModel) -> None:
    """The draft is the target, but misreads even tokens: its state can tell."""
    draft = copy.deepcopy(tiny_target).requires_grad_(True)
    torch.manual_seed(1)
    with torch.no_grad():
        draft.get_input_embeddings().weight[::2].normal_(std=0.2)
    head = AcceptanceLoss(head_for(draft), weight=1.0)
    whole = objective(tiny_target, draft, head)
    groups = [{"params": head.parameters()}, {"params": draft.parameters(), "lr": 1e-4}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    torch.manual_seed(0)
    losses = []
    for step in range(80):
        output = whole(random_batch(step))
        optimizer.zero_grad()
        (output.loss / output.tokens).backward()
        optimizer.step()
        losses.append(float(output.metrics["head"] / output.tokens))
    assert sum(losses[-10:]) < sum(losses[:10])
    batch = random_batch(1000)
    with torch.no_grad():
        rows, q = whole._teacher(batch), hidden_and_head(draft, batch, whole.vocab_size)
        state_KH, scalars_K3, chance_K = head.examples(
            rows, q, batch.loss_mask.flatten(), WARP.transform
        )
        logit_K = head.scorer(state_KH, scalars_K3)
    # Of text that it hasn't seen: better than the best constant, and in the right order.
    constant = F.binary_cross_entropy(chance_K.mean().expand_as(chance_K), chance_K)
    assert F.binary_cross_entropy_with_logits(logit_K, chance_K) < constant
    assert auc(logit_K, torch.rand_like(chance_K) < chance_K) > 0.7


def test_a_stop_changes_nothing(
    joint: Argv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [*joint, "steps=5", "save_every=1", "eval_every=5"]
    distill.main(argv)
    losses = [record["head"] for record in records(tmp_path / "run") if "head" in record]
    drafter = tmp_path / "run/drafter"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # after five steps it may foretell nothing
        found = load_acceptance(drafter, hidden=32)
    assert found is not None and len(losses) == 5
    assert found.scorer.config.state == "parent" and found.scorer.config.scalars == NUMBERS
    counts = found.about["provenance"]["rows"]
    assert counts["used"] == counts["calibrate"] + counts["check"]
    assert found.about["figures"]["rows"] == counts["check"]
    assert (tmp_path / "run/reliability.svg").exists()

    batch = Batches.batch

    def stopping(self: Batches, step: int, *place: int, **world: int) -> Batch:
        if step == 3:
            raise RuntimeError("stopped")
        return batch(self, step, *place, **world)

    again = [*argv, f"out={tmp_path / 'again'}"]
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="stopped"):
        patch.setattr(Batches, "batch", stopping)
        distill.main(again)
    distill.main(again)
    resumed = records(tmp_path / "again")
    assert [r["head"] for r in resumed if "head" in r] == losses
    for name in ("model.safetensors", "acceptance/model.safetensors"):
        assert (tmp_path / "again/drafter" / name).read_bytes() == (drafter / name).read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("head.weight=-1", r"head\.weight: got -1.0 at temperature 1.0"),
        ("temperature=0", r"head\.weight: got 1.0 at temperature 0.0"),
        ("head.scalars=[depth]", r"head\.scalars: got \['depth'\]"),
        ("head.scalars=[speed]", "names of"),
        ("data=nothing.jsonl", "does not exist"),
        ("draft={eagle}", "a head of kind eagle1, expected a draft LM"),
    ],
)
def test_bad_input(
    joint: Argv,
    tmp_path: Path,
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
    change: str,
    message: str,
) -> None:
    if "eagle" in change:
        save_drafter(
            tmp_path / "eagle",
            kind="eagle1",
            model=made("eagle1", tiny_target),
            tokenizer=tiny_tokenizer,
            target_fingerprint=fingerprint(tiny_target, tiny_tokenizer),
            provenance={},
            defaults={},
        )
    with pytest.raises(ValueError, match=message):
        distill.main([*joint, "steps=1", change.format(eagle=tmp_path / "eagle")])
