"""Consistency training: windows beside their text, ways to the fixed point, the loss by loops."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny_heads import ROWS, TOKENS, text, words
from tiny_llama import build_llama
from torch import Tensor
from transformers import LlamaForCausalLM

from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.train.objectives.distillation import NextToken
from draftsmith.train.run.loop import Objective
from draftsmith.train.text.batches import Batch, Batches, Examples
from draftsmith.train.tuning.consistency import Consistency, ConsistencyObjective
from draftsmith.train.tuning.units import Units, UnitsObjective
from draftsmith.train.tuning.windows import BesideText, windows

WINDOW = 4
Answers = list[tuple[list[int], list[int]]]


def model() -> LlamaForCausalLM:
    return build_llama(ROWS, layers=2, hidden=32, seed=0).double()


def objective(of: LlamaForCausalLM, **how: object) -> ConsistencyObjective:
    sizes = Consistency(**{"window": WINDOW} | how)  # type: ignore[arg-type]
    return ConsistencyObjective(of, sizes, drafted=4, vocab_size=TOKENS)


def batch_of(packing: bool) -> Batch:
    return text(packing=packing).batch(0, 0, 0, accumulation=1, world=1)


def documents(batch: Batch) -> list[tuple[int, int, int]]:
    """(row, first, end) of each."""
    found = []
    for row, positions_T in enumerate(batch.position_ids.tolist()):
        starts = [at for at, position in enumerate(positions_T) if position == 0]
        real = len(positions_T) if batch.places is None else int((batch.places[row] >= 0).sum())
        found += [(row, a, b) for a, b in pairwise([*starts, real])]
    return found


def logits(of: LlamaForCausalLM, ids_T: Tensor) -> Tensor:
    return of(input_ids=ids_T[None]).logits[0, :, :TOKENS]  # type: ignore[no-any-return]


def spans(batch: Batch) -> list[tuple[int, int, int, int]]:
    """(row, the document's first, window's begin, end) of each window, counted by hand."""
    found = []
    for row, first, end in documents(batch):
        trained = [at for at in range(first + 1, end) if batch.loss_mask[row, at - 1]]
        while trained:
            begin, size = trained[0], 1
            while size < min(WINDOW, len(trained)) and trained[size] == begin + size:
                size += 1
            found.append((row, first, begin, begin + size))
            trained = trained[size:]
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_windows_are_of_the_trained_text(packing: bool) -> None:
    batch = batch_of(packing)
    begin_BT, counted_BT = windows(batch, WINDOW), torch.zeros_like(batch.input_ids)
    for row, _, begin, end in spans(batch):
        counted_BT[row, begin:end] = begin
    assert torch.equal(begin_BT, counted_BT) and len(set(begin_BT.flatten().tolist())) > 4


@pytest.mark.parametrize("packing", [True, False])
def test_a_version_sees_the_text_before_its_window_and_itself(packing: bool) -> None:
    of, batch = model(), batch_of(packing)
    version_BT = torch.randint(TOKENS, batch.input_ids.shape)
    begin_BT = windows(batch, WINDOW)
    (text_NH, head_VH), (own_NH, _) = BesideText(of, TOKENS).sides(batch, version_BT, begin_BT)
    text_BTV, own_BTV = (
        (hidden_NH @ head_VH.T).unflatten(0, version_BT.shape) for hidden_NH in (text_NH, own_NH)
    )
    for row, first, end in documents(batch):
        alone_TV = logits(of, batch.input_ids[row, first:end])
        torch.testing.assert_close(text_BTV[row, first:end], alone_TV, rtol=1e-6, atol=1e-6)
    for row, first, begin, end in spans(batch):
        mixed = torch.cat([batch.input_ids[row, first:begin], version_BT[row, begin:end]])
        alone_TV = logits(of, mixed)[begin - first :]
        torch.testing.assert_close(own_BTV[row, begin:end], alone_TV, rtol=1e-6, atol=1e-6)


def by_loops(
    of: LlamaForCausalLM, teacher: LlamaForCausalLM, batch: Batch, guess_BT: Tensor, ar: float
) -> Tensor:
    """The loss, a pass for each window and each document."""
    total = torch.zeros((), dtype=torch.float64)
    for row, first, begin, end in spans(batch):
        ids_T, guess_T = batch.input_ids[row, first:end], guess_BT[row, begin:end]
        wrong = (guess_T != ids_T[begin - first :]).tolist()
        if True not in wrong:
            continue
        p_TV = logits(teacher, ids_T)
        q_TV = logits(of, torch.cat([ids_T[: begin - first], guess_T]))
        for at in range(begin - first + wrong.index(True), end - first - 1):
            p_V, q_V = p_TV[at].log_softmax(-1), q_TV[at].log_softmax(-1)
            total = total + (p_V.exp() * (p_V - q_V)).sum()
    for row, first, end in documents(batch):
        log_TV = logits(of, batch.input_ids[row, first:end]).log_softmax(-1)
        for at in range(first, end - 1):
            if batch.loss_mask[row, at]:
                total = total - ar * log_TV[at - first, batch.input_ids[row, at + 1]]
    return total


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("frozen", [True, False], ids=["ours", "twin that teaches with a gradient"])
def test_the_loss_by_loops(packing: bool, frozen: bool) -> None:
    """In value and gradient; one that lets the gradient into the teacher has another gradient."""
    ours, obvious, batch = model(), model(), batch_of(packing)
    made, begin_BT = objective(ours, ar=0.5), windows(batch, WINDOW)
    torch.manual_seed(1)
    guess_BT = torch.where(torch.rand(begin_BT.shape) < 0.4, 7, batch.input_ids)
    output = made.score(batch, begin_BT, guess_BT)
    output.loss.backward()
    teacher = copy.deepcopy(obvious).requires_grad_(False) if frozen else obvious
    expected = by_loops(obvious, teacher, batch, guess_BT, 0.5)
    expected.backward()
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert output.metrics["consistency"] > 1 and output.tokens == batch.loss_mask.sum()
    pairs = zip(ours.parameters(), obvious.parameters(), strict=True)
    close = [torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-5) for a, b in pairs]
    assert all(close) is frozen


def test_at_the_fixed_point_there_is_nothing_to_learn() -> None:
    made, batch = objective(model(), ar=0.0), batch_of(True)
    output = made.score(batch, windows(batch, WINDOW), batch.input_ids)
    assert output.loss.item() == 0.0
    output.loss.backward()
    assert not any(p.grad is not None and p.grad.any() for p in made.parameters())


def written(of: LlamaForCausalLM, prompts: list[list[int]], new: int) -> Batch:
    """Greedy answers, one prompt a row, all of one length."""
    rows = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(new):
            ids.append(int(logits(of, torch.tensor(ids))[-1].argmax()))
        rows.append(ids)
    ids_BT = torch.tensor(rows)
    at_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
    trained_BT = at_BT >= len(prompts[0]) - 1
    trained_BT = trained_BT & (at_BT < ids_BT.shape[1] - 1)
    return Batch(ids_BT, at_BT, trained_BT, None, ())


def test_ways_are_the_model_s_own() -> None:
    """They begin with what comes before; each pass is the choice after the guess; each makes one
    more token right at least; what the model writes is their end.
    """
    of = model()
    made, batch = objective(of), written(of, [[5, 6, 7], [8, 9, 10]], 10)
    begin_BT = windows(batch, WINDOW)
    points = []
    for passes in range(WINDOW + 1):
        torch.manual_seed(2)
        points.append(made.guessed(batch, begin_BT, passes))
    inside_BT = begin_BT > 0
    for row, first, begin, end in spans(batch):
        before = set(batch.input_ids[row, first:begin].tolist())
        assert set(points[0][row, begin:end].tolist()) <= before
        for number, (guess_BT, next_BT) in enumerate(pairwise(points)):
            ids_T = torch.cat([batch.input_ids[row, :begin], guess_BT[row, begin:end]])
            said_T = logits(of, ids_T).argmax(-1)[begin - 1 : end - 1]
            assert torch.equal(next_BT[row, begin:end], said_T)
            right = next_BT[row, begin:end] == batch.input_ids[row, begin:end]
            assert right[: number + 1].all()
    assert torch.equal(points[WINDOW][inside_BT], batch.input_ids[inside_BT])
    assert not torch.equal(points[1][inside_BT], batch.input_ids[inside_BT])


def test_a_step_draws_its_points() -> None:
    """Some guesses are half right; without passes and without mending none is iterated."""
    of = model()
    batch = written(of, [[5, 6, 7], [8, 9, 10]], 10)
    found = []
    for how in ({"passes": 0, "mended": 0.0}, {"passes": 6, "mended": 1.0}):
        made = objective(of, ar=0.0, **how)
        torch.manual_seed(0)
        found.append([made(batch).loss.item() for _ in range(6)])
    assert len(set(found[0])) == len(found[0]) and max(found[1]) < max(found[0])
    assert sum(found[1]) < 0.5 * sum(found[0])


def passes(of: LlamaForCausalLM, answers: Answers, drafter: str) -> tuple[float, bool]:
    """Of this drafter of six tokens a token, and whether it writes these answers."""
    frozen = copy.deepcopy(of).eval().requires_grad_(False)
    tokenizer = words(ROWS)
    decoder = Decoder(frozen, tokenizer, load_drafter(drafter, frozen, tokenizer), K=6)
    params = SamplingParams(0.0, max_new_tokens=len(answers[0][1]), ignore_eos=True)
    done = decoder.generate([prompt for prompt, _ in answers], params)
    counts = [made.counters for made in done]
    told = all(made.tokens == answer for made, (_, answer) in zip(done, answers, strict=True))
    return sum(c.rounds for c in counts) / sum(c.emitted for c in counts), told


def trained(of: Objective, batch: Batch, steps: int) -> None:
    learner = torch.optim.AdamW(of.train().parameters(), lr=0.01)
    torch.manual_seed(0)
    for _ in range(steps):
        output = of(batch)
        (output.loss / output.tokens).backward()
        torch.nn.utils.clip_grad_norm_(of.parameters(), 1.0)
        learner.step()
        learner.zero_grad()


@pytest.mark.parametrize(
    ("drafter", "objective_of", "how", "most"),
    [
        ("jacobi:6", ConsistencyObjective, Consistency(window=6), 0.88),
        ("pads:6", UnitsObjective, Units(pads=6), 0.65),
    ],
)
def test_fewer_passes_write_the_same_text(
    drafter: str, objective_of: Any, how: Any, most: float
) -> None:
    """Eight answers by heart: cross-entropy leaves a pass for nearly each token."""
    draw = torch.Generator().manual_seed(0)
    answers_8T = torch.randint(20, 80, (8, 24), generator=draw).tolist()
    answers = [([number + 2, 80, 81], answer) for number, answer in enumerate(answers_8T)]
    batches = Batches(
        Examples.answered(answers), batch_size=8, max_length=27, seed=0, packing=False, pad_id=1
    )
    batch = batches.batch(0, 0, 0, accumulation=1, world=1)
    plain = build_llama(ROWS, layers=2, hidden=32, seed=0)
    trained(NextToken(plain), batch, 60)
    before, told = passes(plain, answers, drafter)
    assert before > 0.9 and told
    tuned = copy.deepcopy(plain)
    trained(NextToken(plain), batch, 60)
    trained(objective_of(tuned, how, drafted=6, vocab_size=ROWS), batch, 60)
    (still, _), (after, told) = (passes(model, answers, drafter) for model in (plain, tuned))
    assert after < most < still and told, (before, still, after)


@pytest.mark.parametrize("shift", [0, 1], ids=["ours", "twin that says the token before"])
def test_pads_learn_the_units_of_hand_made_chances(
    shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of sure tokens, cut after pads + 1; the loss by a pass for each unit."""
    ours, batch = model(), written(model(), [[5, 6, 7]], 12)
    chances = [0.1, 0.2, 0.9, 0.9, 0.3, 0.9, 0.9, 0.9, 0.9, 0.9, 0.1, 0.9, 0.9, 0.9, 0.9]
    made = UnitsObjective(ours, Units(sure=0.5, pads=3, ar=0.0), drafted=4, vocab_size=TOKENS)
    sure_BT = torch.tensor([chances]) > 0.5
    monkeypatch.setattr(made, "sure", lambda _: sure_BT)
    units = [
        (3, 4),
        (5, 9),
        (9, 10),
        (11, 15),
    ]  # the prompt has three tokens
    begin_BT = windows(batch, 4, sure_BT)
    assert begin_BT[0].tolist() == [0, 0, 0, 3, 0, 5, 5, 5, 5, 9, 0, 11, 11, 11, 11]
    ids_T, expected, pads = batch.input_ids[0], 0.0, 0
    for begin, end in units:
        pads_T = torch.full((end - begin,), made.pad)
        log_TV = logits(ours, torch.cat([ids_T[:begin], pads_T])).log_softmax(-1)
        for at in range(begin, end - 1):
            expected -= log_TV[at - shift, ids_T[at + 1]].item()
            pads += 1
    output = made(batch)
    assert output.metrics["pads"] == pads == 6
    assert (output.loss.item() == pytest.approx(expected, rel=1e-6)) is not shift


def test_a_model_is_sure_of_what_it_gives_most() -> None:
    ours, batch = model(), batch_of(False)
    made = UnitsObjective(ours, Units(sure=0.02), drafted=4, vocab_size=TOKENS)
    sure_BT = made.sure(batch)
    p_BTV = ours(input_ids=batch.input_ids).logits[..., :TOKENS].softmax(-1)
    given_BT = p_BTV[:, :-1].gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    trained_BT = batch.loss_mask[:, :-1]
    assert torch.equal(sure_BT[:, 1:][trained_BT], (given_BT > 0.02)[trained_BT])
    assert sure_BT[:, 1:][trained_BT].any() and not sure_BT[:, 1:][trained_BT].all()
    ours.config.pad_token_id = None
    with pytest.raises(ValueError, match="got a config without pad_token_id"):
        UnitsObjective(ours, Units(), drafted=4, vocab_size=TOKENS)


@pytest.mark.parametrize("how", [{"window": 1}, {"passes": -1}, {"mended": 1.5}, {"ar": -1.0}])
def test_what_cannot_be(how: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"consistency: got .*{next(iter(how))}=.*expected 2 or"):
        objective(model(), **how)
