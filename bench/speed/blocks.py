"""One training step of DFlash, ours against speculators' eager one: time and peak memory.

    python bench/speed/blocks.py                   # two cores, small widths; a few minutes
    python bench/speed/blocks.py --device cuda    # hidden 4096, vocabulary 128k, 256 anchors, bf16

Same model, text and number of anchors, forward, loss and backward, the LM head frozen on both
sides. Arms, memory and time are those of bench/speed/eagle.py, and so is what it needs. speculators
draws its anchors itself, as ours are, so the blocks stand elsewhere, and are as many.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from draftsmith.bench.speed.eagle import Words
from draftsmith.bench.speed.training_step import OURS, measure
from draftsmith.command import parse, run_command
from draftsmith.models.heads.block import KINDS, Block, BlockConfig
from draftsmith.models.layouts.block_layouts import block_exported
from draftsmith.models.taps import TargetStates
from draftsmith.train.objectives.block import Anchors, BlockObjective
from draftsmith.train.text.batches import Batch

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


class Inputs:
    """A head for a target of four layers, and a row of several documents with its states."""

    def __init__(self, args: BlockStep) -> None:
        torch.manual_seed(0)
        width = 128 if args.hidden >= 1024 else 64
        sizes: dict[str, Any] = {
            "vocab_size": args.vocabulary,
            "hidden_size": args.hidden,
            "intermediate_size": 7 * args.hidden // 2,
            "num_attention_heads": args.hidden // width,
            "num_key_value_heads": max(1, args.hidden // width // 4),
            "head_dim": width,
        }
        layer = Qwen3Config(**sizes, num_hidden_layers=args.layers)
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        levels = args.block - (KINDS[args.kind]["labels"] == "same")
        config = BlockConfig(layer, (1, 2, 3), levels, mask_token=0, **KINDS[args.kind])
        with torch.device(args.device):
            four = LlamaConfig(**sizes, num_hidden_layers=4)  # that taps 1 to 3 are inside
            self.target = LlamaForCausalLM(four).to(dtype).requires_grad_(False)
            self.head = Block(config).bind(self.target)
            length = args.length // args.documents
            document_T = torch.arange(args.length) // length
            mask_1T = torch.ones(1, args.length, dtype=torch.bool)
            mask_1T[:, -1] = False
            mask_1T[:, :-1] = document_T[1:] == document_T[:-1]
            self.document_1T = document_T[None]
            ids_1T = torch.randint(args.vocabulary, (1, args.length))
            at_1T = (torch.arange(args.length) % length)[None]
            self.batch = Batch(ids_1T, at_1T, mask_1T, None, (0,))
            self.taps_1TU = torch.randn(1, args.length, 3 * args.hidden, dtype=dtype)
            self.last_1TG = torch.randn(1, args.length, args.hidden, dtype=dtype)


def our_loss(x: Inputs, args: BlockStep) -> Callable[[], Tensor]:
    seen = TargetStates(x.last_1TG, x.taps_1TU)
    given = (x.head, x.target, Words(args.vocabulary), lambda _: seen)
    objective = BlockObjective(Anchors(count=args.anchors), *given).to(args.device)

    def loss() -> Tensor:
        output = objective(x.batch)
        return output.loss / output.tokens

    return loss


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
        return (our_loss if arm == OURS else their_loss)(Inputs(args), args)

    measure(args, __file__, args.kind, f"{shape}{args.block}", loss)


if __name__ == "__main__":
    run_command(main, BlockStep)
