"""What rounds take on this machine with drafters that nobody has trained: `predict measure=true`.

Seconds don't depend on what weights hold, but for mixtures of experts, which aren't timed. A target
of a config.json's shape, its weights random, decodes with a drafter of each kind in its usual
sizes, its weights random too, by the loop that serves. The target's LM head is zero, so that its
answer is one token over and over, which lookups find.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from draftsmith.decode.draft_lms.pard import lm_drafter
from draftsmith.decode.drafters.load import drafter_of, load_drafter
from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.forward.size import available
from draftsmith.decode.predict.draft_sizes import random_model, shape_of
from draftsmith.decode.predict.load_grid import Grid, whole_rounds
from draftsmith.models.draft_lm import EXPERTS
from draftsmith.models.heads.block import KINDS, Block, BlockConfig
from draftsmith.models.heads.clover import Clover
from draftsmith.models.heads.eagle import Eagle, EagleConfig
from draftsmith.models.heads.falcon import Falcon
from draftsmith.models.heads.head import Head
from draftsmith.models.heads.hydra import Hydra, HydraConfig
from draftsmith.models.heads.medusa import Medusa, MedusaConfig
from draftsmith.models.layers.layer import layer_like
from draftsmith.models.taps import block_taps, default_taps
from draftsmith.models.target import head_weight
from draftsmith.models.tokenizer import numbered

LEVELS, BLOCK = 8, 5  # drafted tokens at most; of a block, which is drafted whole
TURN, TURNS = 16, 5  # rounds of a plan in a row, as one call makes them; how often
PROMPT = 32  # tokens
SPARE = 3  # times the target's weights, that all this takes: packed copies, drafters, rows
LONGEST = 600.0  # seconds for all kinds


class Untrained(NamedTuple):
    """What the heads of a target are made of. layer: the sizes of so many decoder layers."""

    layer: Callable[[int], Any]
    layers: int
    hidden: int
    rows: int

    def block(self, layers: int, **own: Any) -> Block:
        config = BlockConfig(self.layer(layers), block_taps(self.layers), BLOCK, **own)
        return Block(config)


# Heads as the recipes that `compare` trains have them, but for tokens ahead.
HEADS: dict[str, Callable[[Untrained], Head]] = {
    "medusa": lambda of: Medusa(MedusaConfig(of.hidden, of.rows, LEVELS)),
    "hydra": lambda of: Hydra(HydraConfig(of.hidden, of.rows, LEVELS)),
    "hydra++": lambda of: Hydra(HydraConfig(of.hidden, of.rows, LEVELS, 4, of.layer(1))),
    "clover2": lambda of: Clover(of.layer(2), of.layers, LEVELS),
    "falcon": lambda of: Falcon(of.layer(1), LEVELS, 2),
    "eagle1": lambda of: Eagle(EagleConfig(of.layer(1), 1)),
    "eagle3": lambda of: Eagle(
        EagleConfig(of.layer(1), 3, default_taps(of.layers), draft_vocab=of.rows)
    ),
    "block": lambda of: of.block(1, light="layer", last=True),
    "dspark": lambda of: of.block(2, rank=64, **KINDS["dspark"]),
    "dflash": lambda of: of.block(2, rank=64, **KINDS["dflash"]),
}


def timed_rounds(
    config: PretrainedConfig,
    kinds: Sequence[str],
    rows: Sequence[int],
    drafts: Mapping[str, PretrainedConfig],
) -> Iterator[tuple[str, Grid | None]]:
    """Of each kind what rounds of 0 (without a drafter) to LEVELS drafted tokens take, at these
    numbers of rows; None of one that this target can't have, or for which there is no memory or
    time. kinds: of HEADS, draft LMs of the configs `drafts`, or what `load_drafter` takes.
    """
    device, begun = torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.monotonic()
    free, mixed = available(device), any(getattr(config, name, 0) for name in EXPERTS)
    plain: Decoder | None = None
    if not mixed and (free is None or SPARE * shape_of(config).weights <= free):
        with suppress(ValueError):  # of a family that the decoder doesn't know
            plain = Decoder(target := one_token(config, device), numbered(config.vocab_size))
    for kind in kinds:
        grid = None
        if plain is not None and time.monotonic() - begun < LONGEST:
            with suppress(ValueError):  # which says what the target lacks
                drafter = untrained(kind, target, plain.tokenizer, drafts)
                grid = timed(target, plain, drafter, rows)
        yield kind, grid


def one_token(config: PretrainedConfig, device: torch.device) -> PreTrainedModel:
    """A random model that says one token over and over."""
    model = random_model(config, device)
    head_weight(model).data.zero_()
    return model


def timed(target: PreTrainedModel, plain: Decoder, drafter: Drafter, rows: Sequence[int]) -> Grid:
    """Of one drafter: plain rounds at their least, others by the median of what they took beside
    those of the same turn, since what else runs here slows now the one turn, now the other.
    """
    decoder = Decoder(target, plain.tokenizer, drafter, K=min(LEVELS, drafter.levels))
    turns = [
        [whole_rounds(each, [[0] * PROMPT], rows, TURN, 1) for each in (plain, decoder)]
        for _ in range(TURNS)
    ]
    bare_MR1, drafts_MRN = (
        np.array([grid.verify_RN for grid in grids]) for grids in zip(*turns, strict=True)
    )
    cost_RN = np.median(drafts_MRN / bare_MR1, axis=0)
    cost_RN[:, 0] = 1  # without a drafter
    return turns[0][1]._replace(verify_RN=cost_RN * bare_MR1.min(axis=0), stairs=())


def untrained(
    kind: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafts: Mapping[str, PretrainedConfig],
) -> Drafter:
    """A drafter of this kind for the target, with weights as they come."""
    vocab = len(tokenizer)
    if kind in drafts:
        return lm_drafter(random_model(drafts[kind], target.device), vocab)
    if kind not in HEADS:
        made = load_drafter(kind, target, tokenizer)
        assert made is not None, "what drafts nothing has no rounds of its own"
        return made
    sizes = target.config.get_text_config()
    of = Untrained(
        lambda layers: layer_like(target, layers),
        *(sizes.num_hidden_layers, sizes.hidden_size, head_weight(target).shape[0]),
    )
    with target.device:
        head = HEADS[kind](of).to(target.dtype).eval().requires_grad_(False)
    return drafter_of(head.bind(target), target, vocab)
