"""One training step of EAGLE-3, ours against speculators' eager one: time and peak memory.

    python bench/speed/eagle.py                   # two cores, small widths; a minute or two
    python bench/speed/eagle.py --device cuda    # hidden 4096, vocabulary 128k, drafts of 32k, bf16

Same model, text and steps S, forward, loss and backward, the LM head frozen on both sides as
speculators keeps it. speculators 0.9.0 must be importable, or be in the folder that the variable
DRAFTSMITH_SPECULATORS names (pip install --no-deps --target; tests/tools/oracle.py lists what it
needs).
Each arm is a process. Its memory is the highest resident size of its steps (on CUDA the allocator's
peak) minus its size before the first, so without weights and inputs. Time is taken in turns, the
order swapped from pair to pair, after one step of each that isn't counted. On CUDA torch.compile,
which speculators has on there, is off in both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import LlamaConfig

from draftsmith.bench.speed.training_step import OURS, Inputs, layer_sizes, measure, our_loss
from draftsmith.command import parse, run_command
from draftsmith.models.heads.eagle import Eagle, EagleConfig
from draftsmith.models.vocab import DraftVocab
from draftsmith.train.objectives.eagle import EagleObjective, Unroll

LARGE = {"hidden": 4096, "vocabulary": 131_072, "draft": 32_000, "length": 2048}
SMALL = {"hidden": 256, "vocabulary": 16_384, "draft": 4096, "length": 1024}


@dataclass
class EagleStep:
    """The shapes of a step; a size of 0 is LARGE's on CUDA, else SMALL's."""

    device: str = "cpu"  # cpu | cuda
    hidden: int = 0
    vocabulary: int = 0
    draft: int = 0  # vocabulary
    length: int = 0
    steps: int = 7
    documents: int = 1  # in an arm's row
    pairs: int = 3
    out: str = "runs/bench"  # the folder
    worker: str = ""  # for a process of its own: the arm that it is

    def __post_init__(self) -> None:
        for name, size in (LARGE if self.device == "cuda" else SMALL).items():
            setattr(self, name, getattr(self, name) or size)


def inputs(args: EagleStep) -> Inputs:
    """Of a target of two layers, for taps 0 to 2."""
    layer = LlamaConfig(**layer_sizes(args), num_hidden_layers=1)

    def head() -> Eagle:
        made = Eagle(EagleConfig(layer, taps=(0, 1, 2), draft_vocab=args.draft))
        made.set_vocab(DraftVocab(torch.arange(args.draft), args.vocabulary))
        made.lm_head.requires_grad_(False)
        return made

    return Inputs(args, 2, head, masked=True)


def their_loss(x: Inputs, args: EagleStep) -> Callable[[], Tensor]:
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = LlamaConfig(**x.head.config.layer.to_dict())
    layer._attn_implementation = "eager"
    about = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=args.draft, speculators_config=about
    )
    with torch.device(args.device):
        model = Eagle3DraftModel(config)
    borrowed = {
        "embed_tokens.weight": x.target.model.embed_tokens.weight,
        "verifier_lm_head.weight": x.target.lm_head.weight[: args.draft],
        "verifier_norm.weight": x.target.model.norm.weight,
    }
    model.load_state_dict({**x.head.state_dict(), **borrowed})
    x.head = x.target = None
    b, losses = x.batch, resolve_loss_config("kl_div", "eager")
    taps, last = x.taps_1TU[:, :-1].float(), x.last_1TG[:, 1:].float()

    def loss() -> Tensor:
        return model(
            hidden_states=taps,
            input_ids=b.input_ids[:, 1:],
            document_ids=x.document_1T[:, :-1],
            loss_mask=b.loss_mask[:, 1:],
            position_ids=b.position_ids[:, :-1],
            verifier_last_hidden_states=last,
            ttt_steps=args.steps,
            ttt_step_loss_decay=0.8,
            loss_config=losses,
        )[1]

    return loss


def main(argv: list[str]) -> None:
    args = parse(EagleStep, argv)
    shape = f"H {args.hidden}, V {args.vocabulary}, D {args.draft}, T {args.length}, S {args.steps}"

    def loss(arm: str) -> Callable[[], Tensor]:
        if arm != OURS:
            return their_loss(inputs(args), args)
        return our_loss(inputs(args), args, partial(EagleObjective, Unroll(steps=args.steps)))

    measure(args, __file__, "EAGLE-3", shape, loss)


if __name__ == "__main__":
    run_command(main, EagleStep)
