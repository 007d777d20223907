"""The transform against transformers' processors; the noise against its law."""

import math

import pytest
import torch
from chi_square import chi_square_p
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.decode.forward.compiled import library
from draftsmith.decode.sampling import (
    SamplingParams,
    choose,
    log_race,
    position_keys,
    request_seeds,
    top_k_values,
    transform,
    uniform,
)

FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.6, 20, 0.9, 0.0),
    (1.7, 20, 0.9, 0.07),
    (0.8, 100, 0.95, 0.3),
]


def warpers(temperature: float, top_k: int, top_p: float, min_p: float) -> LogitsProcessorList:
    """transformers' own, in the order of its generate."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    if min_p:
        chain.append(MinPLogitsWarper(min_p))
    return chain


@pytest.mark.parametrize("tied", [False, True], ids=["random", "ties"])
@pytest.mark.parametrize("filters", FILTERS)
def test_transform_equals_transformers(
    filters: tuple[float, int, float, float], tied: bool
) -> None:
    logits_BV = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 3
    logits_BV = logits_BV.round() if tied else logits_BV
    expected_BV = warpers(*filters)(None, logits_BV.clone())
    got_BV = transform(logits_BV, *filters)
    # Which of a tie at top-p's edge they keep depends on their sort; how many doesn't.
    expected_BV, seen_BV = (x.sort(-1).values if tied else x for x in (expected_BV, got_BV))
    assert torch.equal(torch.isinf(expected_BV), torch.isinf(seen_BV))
    assert torch.allclose(expected_BV, seen_BV, atol=1e-6)
    temperature, top_k, top_p, min_p = filters
    params = SamplingParams(temperature, top_k, top_p, min_p=min_p)
    assert torch.equal(params.transform(logits_BV), got_BV)
    # Each filter acts: without the last that is on, more tokens are left.
    weaker = max((i for i, off in ((1, 0), (2, 1.0), (3, 0.0)) if filters[i] != off), default=None)
    if weaker is not None:
        less = [*filters[:weaker], (0, 0, 1.0, 0.0)[weaker], *filters[weaker + 1 :]]
        assert torch.isfinite(transform(logits_BV, *less)).sum() > torch.isfinite(got_BV).sum()


def test_a_row_is_filtered_alike_alone_and_among_others() -> None:
    logits_BV = torch.randn(40, 3000, generator=torch.Generator().manual_seed(2)).round()
    together_BV = transform(logits_BV, 1.0, 500, 0.7, 0.001)
    for row in range(0, 40, 7):
        alone_1V = transform(logits_BV[row : row + 1], 1.0, 500, 0.7, 0.001)
        assert torch.equal(alone_1V[0], together_BV[row])


def test_transform_keeps_at_least_one_token() -> None:
    logits_BV = torch.randn(8, 30, generator=torch.Generator().manual_seed(1))
    for filters in ((0, 1e-6, 0.0), (0, 1.0, 0.999), (1, 1e-6, 0.999)):
        kept = torch.isfinite(transform(logits_BV, 1.0, *filters)).sum(-1)
        assert kept.tolist() == [1] * 8


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 1e-40},
        {"top_k": -1},
        {"top_k": 5},
        {"top_p": 0.0},
        {"top_p": math.nan, "temperature": 1.0},
        {"top_p": 0.9},
        {"min_p": 1.0, "temperature": 1.0},
        {"min_p": -0.1},
        {"min_p": 0.1},
        {"max_new_tokens": 0},
        {"stop": "end"},
        {"stop": ("a", "")},
        {"stop": ("a", "b", "a")},
    ],
    ids=str,
)
def test_bad_params_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(bad))}: got .*expected"):
        SamplingParams(**bad)


def stable_top_k(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: sort by value, ties by id."""
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], ids[..., :k]


@pytest.mark.parametrize("vocab", [7, 64, 1000, 4096, 32_001])
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "inf", "zeros", "bf16"])
def test_top_k_breaks_ties_by_id(vocab: int, kind: str) -> None:
    scores = torch.randn(3, 2, vocab, generator=torch.Generator().manual_seed(vocab))
    if kind == "ties":
        scores = scores.round()
    elif kind == "equal":
        scores = torch.full_like(scores, -2.5)
    elif kind == "inf":  # fewer finite values than asked for
        scores = scores.masked_fill(torch.arange(vocab) % (vocab // 3) != 1, float("-inf"))
        scores[0, 0, -2:] = float("inf")
    elif kind == "zeros":
        scores = torch.where(scores > 0.5, 0.0, torch.where(scores > -0.5, -0.0, -1.0))
    elif kind == "bf16":
        scores = scores.bfloat16()
    for k in (1, 5, 32):
        if k <= vocab:
            values, ids = top_k_values(scores, k)
            expected_values, expected_ids = stable_top_k(scores, k)
            assert torch.equal(values, scores.gather(-1, ids))
            assert torch.equal(ids, expected_ids)
            assert torch.equal(values, expected_values)
            assert torch.equal(values, scores.topk(k, dim=-1).values)
            assert values.dtype == scores.dtype


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


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("vocab", [1, 37, 4_096, 131_072])
def test_noise_in_one_call_is_torchs_to_the_last_bit(
    vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers and their logarithms; of keys that lie apart in memory too."""
    keys_BD = position_keys(torch.arange(-2, 3), torch.arange(4).expand(5, -1)).roll(1, 0)[::2, 1:]
    assert not keys_BD.is_contiguous()
    ours = log_race(keys_BD, vocab)
    monkeypatch.setattr("draftsmith.decode.sampling.library", lambda: None)
    assert torch.equal(ours, log_race(keys_BD, vocab))
    assert not torch.equal(ours, log_race(keys_BD + 1, vocab))


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
