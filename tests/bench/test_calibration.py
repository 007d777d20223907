"""The calibration of a drafter's scores: which nodes of a grown tree were kept."""

import numpy as np
from block_drafts import counting, drafter
from eagle_drafts import counting as counting_pair
from transformers import PreTrainedTokenizerBase
from truths import PROMPTS

from draftsmith.bench.evidence.calibration import judged, second
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams


def test_the_nodes_of_the_kept_paths_are_the_ones_that_count(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Of a target that counts and a drafter that knows: those that it is sure of, at any depth."""
    target = counting_pair(0.0)[0]
    decoder = Decoder(
        target, tiny_tokenizer, drafter(counting(target), target), tree="dynamic:4,3,12"
    )
    nodes = judged(decoder, PROMPTS, SamplingParams(max_new_tokens=14))
    depth, chance, kept, rank, may = nodes.T
    assert {1, 2, 3, 4} == set(depth[kept == 1]) and (kept == 0).sum() > (kept == 1).sum()
    assert chance[kept == 1].min() > 0.5 > chance[kept == 0].max()
    # The first child is always the right one here: where it was kept, no second one may be.
    assert set(rank[kept == 1]) == {1} and (may[kept == 1] == 1).all()
    assert (may[rank > 1] == 0).all() and {2, 3} <= set(rank)


def test_the_second_child_counts_where_the_first_failed() -> None:
    rows = [(1, 0.6, 1, 1, 1), (1, 0.3, 0, 2, 0), (1, 0.6, 0, 1, 1), (1, 0.3, 1, 2, 1)]
    rows += [(1, 0.6, 0, 1, 1), (1, 0.3, 0, 2, 1), (1, 0.1, 1, 3, 1), (2, 0.1, 0, 2, 0)]
    rows += [(1, 0.6, 0, 1, 1), (2, 0.6, 0, 1, 1)]  # whose second child the tree lacks
    assert second(np.array(rows, float)) == 0.25
    assert second(np.array(rows[:2], float)) is None
