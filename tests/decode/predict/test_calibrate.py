"""Calibrated trees: the values of the nodes foretell tau, and the tree is the best one."""

import itertools
import random

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.evaluate import metrics
from draftsmith.decode.predict.best_tree import answer_ranks, calibrate, path_values, walk
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.tree_shapes import StaticTree, chain_plan


def traces(count: int, length: int, seed: int) -> list[list[int]]:
    """Ranks that depend on the one before: after a miss the next is likely a miss too."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        row, sure = [], True
        for _ in range(length):
            sure = rng.random() < (0.85 if sure else 0.5)
            row.append(0 if sure else min(1 + int(rng.expovariate(0.6)), 40))
        found.append(row)
    return found


def measured(ranks: list[list[int]], tree: StaticTree) -> tuple[float, int]:
    """tau of decoding these answers, and its rounds; the first round of each is complete."""
    rounds = [walk(row, tree) for row in ranks]
    count = sum(map(len, rounds))
    return sum(map(len, ranks)) / count, count


@pytest.mark.parametrize(("nodes", "levels"), [(4, 4), (16, 4), (40, 6)])
def test_expected_tau_is_that_of_other_texts(nodes: int, levels: int) -> None:
    made = calibrate(traces(100, 500, seed=0), nodes, levels)
    tau, rounds = measured(traces(200, 500, seed=1), made.tree)
    assert rounds > 20_000
    assert abs(made.tau / tau - 1) < 0.05
    assert made.interval is not None
    low, high = made.interval
    assert low <= made.tau <= high and high - low < 0.1 * tau  # of 100 answers
    assert calibrate(traces(1, 500, seed=0), 4, 4).interval is None
    assert len(made.tree.paths) == len(made.values) == nodes


def test_depths_taken_apart_foretell_worse() -> None:
    """The twin multiplies each depth's own rates, as if they knew nothing of each other."""
    ranks = traces(100, 500, seed=0)
    tau = measured(ranks, chain_plan(6))[0]
    whole = calibrate(ranks, 6, 6)
    rate = sum(r == 0 for row in ranks for r in row) / sum(map(len, ranks))
    apart = sum(rate**depth for depth in range(7))
    # `whole` may be any tree of 6 nodes; of the chain's own paths the values sum up likewise.
    starts = [walk(row, chain_plan(6)) for row in ranks]
    values = path_values(ranks, starts, 6)
    chained = 1 + sum(values[path] for path in chain_plan(6).paths)
    assert abs(chained / tau - 1) < 0.02 < abs(apart / tau - 1)
    assert whole.tau >= chained * 0.98


def test_no_tree_of_that_size_is_better() -> None:
    ranks = traces(40, 300, seed=2)
    made = calibrate(ranks, 3, 3)
    paths = [p for d in (1, 2, 3) for p in itertools.product(range(3), repeat=d)]
    best = 0.0
    for chosen in itertools.combinations(paths, 3):
        if all(len(p) == 1 or p[:-1] in chosen for p in chosen):
            best = max(best, measured(ranks, StaticTree.from_paths(chosen))[0])
    assert measured(ranks, made.tree)[0] >= 0.98 * best


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_trace_tells_what_the_decoder_does(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    temperature: float,
) -> None:
    """Walking the ranks of plain answers gives the decoder's own number of rounds."""
    params = SamplingParams(temperature=temperature, max_new_tokens=60, ignore_eos=True)
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    prompts = [[5 + i, 9, 30 + i] for i in range(6)]
    answers = Decoder(tiny_target, tiny_tokenizer).generate(prompts, params)
    ranks, sharpness = answer_ranks(drafter, answers, params)
    assert 0.5 <= sharpness <= 8
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, tree="eagle-25")
    done = decoder.generate(prompts, params)
    tree = decoder.settings.plan
    assert [c.counters.rounds for c in done] == [len(walk(row, tree)) for row in ranks]
    assert metrics.block_efficiency([c.counters for c in done]) > 1


def test_the_end_of_an_answer_counts_once() -> None:
    assert path_values([[0]], [[0]], 4) == {(0,): 1.0}
    values = path_values(traces(20, 9, seed=3), [[0, 3, 7]] * 20, 4)
    assert max(values.values()) <= 1
    assert all(value <= values.get(path[:-1], 1.0) for path, value in values.items())


def test_a_trace_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="without tokens"):
        calibrate([[], []], 4, 4)
    with pytest.raises(ValueError, match="more prompts"):
        calibrate([[0, 0]], 9, 2)
