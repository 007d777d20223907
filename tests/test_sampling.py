"""The transform against transformers' processors; the noise against its law."""

import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.decode.sampling import (
    SamplingParams,
    choose,
    log_race,
    position_keys,
    request_seeds,
    transform,
    uniform,
)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (0.6, 20, 0.9)]
)
def test_transform_equals_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits_BV = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 3
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    expected_BV = chain(None, logits_BV.clone())
    got_BV = transform(logits_BV, temperature, top_k, top_p)
    assert torch.equal(torch.isinf(expected_BV), torch.isinf(got_BV))
    assert torch.allclose(expected_BV, got_BV, atol=1e-6)


def test_transform_keeps_at_least_one_token() -> None:
    logits_BV = torch.randn(8, 30, generator=torch.Generator().manual_seed(1))
    kept = torch.isfinite(transform(logits_BV, 1.0, 0, 1e-6)).sum(-1)
    assert kept.tolist() == [1] * 8


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"max_new_tokens": 0}]
)
def test_bad_params_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)


def draw_many(logits_V: torch.Tensor, draws: int, seed: int) -> torch.Tensor:
    """Counts [V] of `draws` samples, one a position, in bounded memory."""
    vocab = logits_V.shape[0]
    counts_V = torch.zeros(vocab, dtype=torch.int64)
    step = max(1, 4_000_000 // vocab)
    for start in range(0, draws, step):
        positions = torch.arange(start, min(draws, start + step))[None]
        keys = position_keys(torch.tensor([seed]), positions)
        counts_V += torch.bincount(choose(logits_V, log_race(keys, vocab))[0], minlength=vocab)
    return counts_V


def chi_square_p(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """P(chi-square this large), by the Wilson-Hilferty normal approximation."""
    expected = probs.double() * counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    df = len(counts) - 1
    z = ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return 0.5 * math.erfc(z / math.sqrt(2))


def test_small_vocabulary_has_the_right_law() -> None:
    logits_V = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5])
    counts = draw_many(logits_V, 200_000, seed=3)
    assert chi_square_p(counts, logits_V.softmax(-1)) > 1e-3
    # The check can fail: the law of slightly wrong logits is told apart.
    assert chi_square_p(counts, (logits_V * 1.05).softmax(-1)) < 1e-6


def test_vocabulary_128k_has_the_right_law() -> None:
    vocab, groups = 131_072, 64
    rank_V = torch.arange(1, vocab + 1).double()
    logits_V = (-1.1 * rank_V.log()).float()[
        torch.randperm(vocab, generator=torch.Generator().manual_seed(0))
    ]
    counts_V = draw_many(logits_V, 3_000, seed=11)
    # Groups of tokens of equal total probability, by id modulo: the sampler knows nothing of them.
    probs_G = (
        torch.zeros(groups)
        .double()
        .index_add_(0, torch.arange(vocab) % groups, logits_V.double().softmax(-1))
    )
    counts_G = counts_V.view(-1, groups).sum(0)
    assert chi_square_p(counts_G, probs_G) > 1e-3
    top = logits_V.topk(20).indices
    probs_T = torch.cat([logits_V.double().softmax(-1)[top], torch.zeros(1).double()])
    probs_T[-1] = 1 - probs_T.sum()
    counts_T = torch.cat([counts_V[top], (counts_V.sum() - counts_V[top].sum())[None]])
    assert chi_square_p(counts_T, probs_T) > 1e-3


def test_ties_are_rare_at_128k() -> None:
    keys = position_keys(torch.tensor([5]), torch.arange(40)[None])
    smallest = log_race(keys, 131_072)[0].topk(2, largest=False).values
    assert (smallest[:, 0] < smallest[:, 1]).all()


def test_noise_depends_on_seed_position_token_and_stream_only() -> None:
    seeds = torch.tensor([request_seeds(0, 1), request_seeds(0, 2)])
    together = position_keys(seeds, torch.tensor([[7, 8], [7, 8]]))
    alone = position_keys(seeds[1:], torch.tensor([[8]]))
    assert together[1, 1] == alone[0, 0]
    assert len(set(together.flatten().tolist())) == 4
    assert position_keys(seeds, torch.tensor([[7], [7]]), stream=1)[0, 0] != together[0, 0]
    assert torch.equal(log_race(together, 50)[..., :20], log_race(together, 20))


def test_uniform_is_strictly_inside() -> None:
    u = uniform(position_keys(torch.tensor([1]), torch.arange(100_000)[None]))
    assert float(u.min()) > 0
    assert float(u.max()) < 1
    assert abs(float(u.mean()) - 0.5) < 0.005


def test_filtered_tokens_are_never_drawn() -> None:
    logits_V = torch.full((100,), float("-inf"))
    logits_V[[3, 50]] = 0.0
    counts = draw_many(logits_V, 2_000, seed=0)
    assert counts[[3, 50]].sum() == 2_000
