"""Block drafters of every form, random or counting; and what one drafts, node by node, by the
obvious loop: the head run over a text that a path has been written into.

Shapes: T positions of a text, U width of the taps, V vocabulary.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from eagle_drafts import SIZES, VOCAB
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from draftsmith.decode.drafters.block import BlockDrafter
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.heads.block import KINDS, LABELS, MASKS, Block, BlockConfig, Guess
from draftsmith.models.layers.block_lights import LIGHTS
from draftsmith.models.taps import target_states

LEVELS = 4
OURS: dict[str, dict[str, Any]] = {
    "rnn": {"light": "rnn", "mask": "full"},
    "gru-two": {"light": "gru", "layers": 2},
    "gated-qwen": {"light": "gated", "labels": "same", "kind": Qwen3Config},
    "noise": {"light": "none", "noise": True},
    "noise-markov": {"noise": True, "layers": 2},
    "noise-swiglu": {"light": "swiglu", "noise": True},
    "noise-path": {"light": "path", "noise": True, "last": True},
    "layer-qwen": {"light": "layer", "mask": "full", "kind": Qwen3Config, "convs": True},
    "noise-layer": {"light": "layer", "noise": True, "last": True},
    "narrow": {"light": "layer", "narrow": 16},
}
# The published ones, and what they are not.
FORMS: dict[str, dict[str, Any]] = KINDS | OURS
GRID: dict[str, dict[str, Any]] = {
    f"{light}-{labels}-{mask}": {"light": light, "labels": labels, "mask": mask}
    for light, labels, mask in product(LIGHTS, LABELS, MASKS)
} | {f"{light}-noise": {"light": light, "noise": True} for light in LIGHTS}


def made(name: str, **changes: Any) -> Block:
    """A random drafter in which nothing is what it was born as. changes: of the config, or kind,
    layers and sizes of these.
    """
    about = {"taps": (1, 2), "levels": LEVELS, "rank": 8} | (FORMS | GRID)[name] | changes
    kind, layers, sizes = (
        about.pop(what, usual)
        for what, usual in (("kind", LlamaConfig), ("layers", 1), ("sizes", {}))
    )
    torch.manual_seed(5)
    layer = kind(**SIZES | sizes, num_hidden_layers=layers)
    head = Block(BlockConfig(layer, **about)).eval().requires_grad_(False)
    for part, parameter in head.named_parameters():
        if parameter.ndim == 1 and part != "mask":
            parameter.copy_(1 + torch.randn_like(parameter) / 3)
        else:
            strong = part.startswith("light") and "self_attn" not in part  # else one is all it sees
            nn.init.normal_(parameter, std=1.0 if strong else 0.2)
    return head


def counting(target: PreTrainedModel, labels: str = "shifted", off: int = 0) -> Block:
    """Of a target made by `eagle_drafts.counting`: its Markov head alone knows what comes next, or
    what comes `off` tokens later.
    """
    head = made("dspark", labels=labels, rank=32)
    head.norm.weight.zero_()  # no word of the trunk's
    head.light.before.weight.copy_(target.get_input_embeddings().weight)
    head.light.after.weight.copy_(target.lm_head.weight.roll(off, 0))
    return head


def guessing(target: PreTrainedModel) -> Block:
    """Of such a target, without a light head: each row says the token after the one that its input
    is, the first row's the pending token, the second's what the first guessed.
    """
    head = made("noise", levels=2)
    head.mask.zero_()
    head.norm.weight.fill_(1.0)
    head.guess.weight.copy_(torch.eye(32))
    for layer in head.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return head


def racing(head: Block, params: SamplingParams, race_DV: Tensor | None, vocab: int) -> Guess:
    """What the rows of one block guess where the race of their tokens is known, as a loop."""

    def guess(states_BRH: Tensor) -> Tensor:
        won = []
        for row, state_H in enumerate(states_BRH[0]):
            score_V = params.transform((head.target_head_VH @ state_H)[:vocab])
            if race_DV is not None and row < len(race_DV):
                score_V = score_V - race_DV[row]
            won.append(int(score_V.argmax()))
        return torch.tensor([won])

    return guess


def laws(
    head: Block, target: PreTrainedModel, text: list[int], guess: Guess, vocab: int
) -> Callable[[list[int]], Tensor]:
    """Path of drafted tokens, the pending one first -> raw logits [V] of what comes after it, by
    `Block.drafted` over the text with the path written behind it.
    """
    taps_1TU = target_states(target, head.taps, input_ids=torch.tensor([text])).taps_BTF
    taps_1TU = F.pad(taps_1TU, (0, 0, 0, 2 * head.block))  # none of what comes later
    at_1T, anchor_11 = torch.arange(taps_1TU.shape[1])[None], torch.tensor([[len(text)]])

    def law(path: list[int]) -> Tensor:
        whole = [*text, *path, *[0] * (2 * head.block - len(path))]
        given = taps_1TU, torch.tensor([whole]), at_1T, anchor_11, guess
        state_I = head.drafted(*given)[1][0, 0, len(path) - 1]
        return (torch.cat(head.heads, 1) @ state_I)[:vocab]

    return law


def drafter(head: Block, target: PreTrainedModel) -> BlockDrafter:
    return BlockDrafter(head, target, VOCAB)
