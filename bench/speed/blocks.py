"""One training step of DFlash, ours against speculators' eager one: time and peak memory.

    python bench/speed/blocks.py                   # two cores, small widths; a few minutes
    python bench/speed/blocks.py --device cuda    # hidden 4096, vocabulary 128k, 256 anchors, bf16

Same model, text and number of anchors, forward, loss and backward, the LM head frozen on both
sides. Arms, memory and time are those of bench/speed/eagle.py, and so is what it needs. speculators
draws its anchors itself, as ours are, so the blocks stand elsewhere, and are as many.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import Qwen3Config

from draftsmith.bench.speed.training_step import OURS, Inputs, layer_sizes, measure, our_loss
from draftsmith.command import parse, run_command
from draftsmith.models.heads.block import KINDS, Block, BlockConfig
from draftsmith.models.layouts.block_layouts import block_exported
from draftsmith.train.objectives.block import Anchors, BlockObjective

LARGE = {"hidden": 4096, "vocabulary": 131_072, "length": 2048, "anchors": 256}
SMALL = {"hidden": 512, "vocabulary": 16_384, "length": 1024, "anchors": 64}


@dataclass
class BlockStep:
    """The shapes of a step; a size of 0 is LARGE's on CUDA, else SMALL's."""

    device: str = "cpu"  # cpu | cuda
    kind: str = "dflash"  # dflash | dspark
    hidden: int = 0
    vocabulary: int = 0
    length: int = 0
    anchors: int = 0
    block: int = 16  # rows
    layers: int = 2
    documents: int = 1  # in an arm's row
    pairs: int = 3
    out: str = "runs/bench"  # the folder
    worker: str = ""  # for a process of its own: the arm that it is

    def __post_init__(self) -> None:
        for name, size in (LARGE if self.device == "cuda" else SMALL).items():
            setattr(self, name, getattr(self, name) or size)


def inputs(args: BlockStep) -> Inputs:
    """Of a target of four layers, that taps 1 to 3 are inside."""
    layer = Qwen3Config(**layer_sizes(args), num_hidden_layers=args.layers)
    levels = args.block - (KINDS[args.kind]["labels"] == "same")
    config = BlockConfig(layer, (1, 2, 3), levels, mask_token=0, **KINDS[args.kind])
    return Inputs(args, 4, partial(Block, config))


def their_loss(x: Inputs, args: BlockStep) -> Callable[[], Tensor]:
    from speculators import SpeculatorModel, SpeculatorModelConfig
    from speculators.losses import resolve_loss_config

    made = block_exported("speculators", x.head.to_json(), x.head.on_disk(), x.target)
    made.config["speculators_config"]["verifier"]["name_or_path"] = None
    config = SpeculatorModelConfig.from_dict(made.config)
    config.transformer_layer_config._attn_implementation = "eager"
    with torch.device(args.device):
        model = SpeculatorModel.registered_model_class_from_config(config)(config)
    borrowed = {
        "embed_tokens.weight": x.target.model.embed_tokens.weight,
        "lm_head.weight": x.target.lm_head.weight,
        "verifier_lm_head.weight": x.target.lm_head.weight,
        "verifier_norm.weight": x.target.model.norm.weight,
    }
    model.load_state_dict(made.tensors | borrowed)
    x.head = x.target = None
    b, options = x.batch, {"loss_config": resolve_loss_config("kl_div", "eager")}
    if args.kind == "dspark":
        options["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
    taps, last = x.taps_1TU.float(), x.last_1TG.float()

    def loss() -> Tensor:
        return model(
            hidden_states=taps,
            input_ids=b.input_ids,
            document_ids=x.document_1T,
            loss_mask=b.loss_mask,
            position_ids=b.position_ids,
            verifier_last_hidden_states=last,
            max_anchors=args.anchors,
            **options,
        )[1]

    return loss


def main(argv: list[str]) -> None:
    args = parse(BlockStep, argv)
    shape = f"H {args.hidden}, V {args.vocabulary}, T {args.length}, {args.anchors} anchors of "

    def loss(arm: str) -> Callable[[], Tensor]:
        if arm != OURS:
            return their_loss(inputs(args), args)
        return our_loss(inputs(args), args, partial(BlockObjective, Anchors(count=args.anchors)))

    measure(args, __file__, args.kind, f"{shape}{args.block}", loss)


if __name__ == "__main__":
    run_command(main, BlockStep)
