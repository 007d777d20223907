"""The block drafter that a run starts from: one of its recipe's sizes, or an earlier result."""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.command import check_least, check_one_of
from draftsmith.models.heads.block import KINDS, Block, BlockConfig
from draftsmith.models.layers.layer import LAYER_CONFIGS, layer_json, layer_like, read_layer
from draftsmith.models.taps import block_taps
from draftsmith.train.drafts.start import earlier_head, place


@dataclass(kw_only=True)
class BlockSource:
    """The group `head` of a block drafter's recipe."""

    path: str = ""  # a drafter folder to go on from: all else is then as it is there
    kind: str = ""  # dflash | dflash2 | dspark | domino | jetspec | treeflash: sets the next four
    light: str = "markov"  # none | markov | gated | selector | rnn | gru | swiglu | path | layer
    labels: str = "shifted"  # shifted: the first row drafts the first token | same: it drafts none
    mask: str = "causal"  # of a block's rows among themselves: full | causal
    convs: bool = False  # short convolutions around each half of a layer
    noise: bool = False  # reads the noise that the target will draw with
    last: bool = False  # the last context state is added to every row
    levels: int = 7  # tokens of a block
    mask_token: int = -1  # whose embedding MASK is, as other stacks want it; -1: a learnt vector
    layers: int = 2
    layer: str = ""  # llama | qwen3, the one that other stacks read; empty: as the target's
    rank: int = 256  # of the light head
    narrow: int = 0  # width of the MLP of light=layer; 0: as the trunk's
    taps: list[int] = field(default_factory=list)  # empty: `block_taps`
    init: str = "target"  # target: as its last layers, reading its deepest tap | random


def open_block(
    source: BlockSource, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int
) -> Block:
    """The drafter of `source` in fp32, bound to `target` and on its device. ValueError: settings
    that it can't have, or an earlier one of another kind or target.
    """
    if source.path:
        what = "a block drafter; give another folder"
        return earlier_head(source.path, target, tokenizer, Block.kinds, what)
    check_one_of("head.kind", source.kind or "block", ("block", *KINDS))
    check_one_of("head.init", source.init, ("target", "random"))
    check_least(source, levels=1, layers=1, rank=1)
    layer = layer_like(target, source.layers)
    kind = source.layer or layer.model_type
    check_one_of("head.layer", kind, LAYER_CONFIGS)
    layer = read_layer(layer_json(layer) | {"model_type": kind})
    taps = tuple(source.taps or block_taps(target.config.get_text_config().num_hidden_layers))
    names = (own.name for own in fields(BlockConfig) if own.name not in ("layer", "taps"))
    said: dict[str, Any] = {name: getattr(source, name) for name in names}
    config = BlockConfig(layer, taps, **said | KINDS.get(source.kind, {}))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        head = Block(config)
    place(head, target.device)
    return head.init_from(target) if source.init == "target" else head.bind(target)
