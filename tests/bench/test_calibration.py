"""The calibration of a drafter's scores: which nodes of a grown tree were kept."""

from block_drafts import counting, drafter
from eagle_drafts import counting as counting_pair
from transformers import PreTrainedTokenizerBase
from truths import PROMPTS

from draftsmith.bench.evidence.calibration import judged
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
    depth, chance, kept = nodes.T
    assert {1, 2, 3, 4} == set(depth[kept == 1]) and (kept == 0).sum() > (kept == 1).sum()
    assert chance[kept == 1].min() > 0.5 > chance[kept == 0].max()
