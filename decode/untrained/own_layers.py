"""The target drafts with some of its own layers, in its own keys and values.

    exit:E          its first E layers, then its norm and LM head  (LayerSkip's draft, 2404.16710)
    skip:3+5a+6m    all but layer 3, the attention of layer 5 and the feed-forward of layer 6
                    (Draft & Verify, 2309.08168)

What a draft call writes lies beyond the committed slots, and verification, which runs every layer
over the whole tree, writes it anew. So there is no state to keep up, a rejected node costs nothing,
and whatever is left out, the answer is the target's own. Starting verification at layer E instead
saves no reading of weights at small batches: the last drafted token would need the first layers
again. The final norm was fitted to the last layer: exits of a target that wasn't trained for them
agree little.

Shapes: B rows, T tokens, F nodes fed.
"""

import copy
import re
from collections.abc import Collection, Iterable, Set
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Drafter, Fed, Feed, Frontier, Round
from draftsmith.decode.drafting.grow_tree import at_once, grow, grow_at_once
from draftsmith.decode.drafting.in_rounds import Draws, InRounds, lm_rounds
from draftsmith.decode.forward.kv import KVPool, round_up
from draftsmith.decode.forward.lean import LeanBody
from draftsmith.decode.forward.native import HALVES, Half, NativeBody
from draftsmith.decode.forward.runner import Runner, Seen
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.token_tree import TokenTree
from draftsmith.decode.tree_shapes import Plan
from draftsmith.models.taps import decoder_layers
from draftsmith.models.target import bytes_read, output_head

Unit = frozenset[Half]  # left out or not: a half, or a whole layer
LETTERS = {"": HALVES, "a": HALVES[:1], "m": HALVES[1:]}


class OwnLayersDrafter(Drafter):
    """Trees and chains from the target's first `last` layers without some halves. ValueError: see
    `Runner.part`.
    """

    shares = True
    held: tuple[str, ...] = ("pool",)

    def __init__(
        self, kind: str, target: PreTrainedModel, vocab_size: int, last: int, without: Set[Half]
    ) -> None:
        self.kind, self.last, self.without = kind, last, without
        self.whole = Runner(target, vocab_size)
        self.runner = self.whole.part(last, without)
        self.context = self.runner.context

    @classmethod
    def named(cls, kind: str, says: str, target: PreTrainedModel, vocab_size: int) -> Self:
        """exit:E or skip:SET; ValueError for anything else, and for a set that leaves nothing."""
        depth = target.config.get_text_config().num_hidden_layers
        if kind == "exit":
            if not says.isdecimal() or int(says) > depth:
                raise ValueError(
                    f"drafter: got exit:{says}, expected exit:E with E layers, 0 to {depth}, of "
                    "this target"
                )
            return cls(kind, target, vocab_size, int(says), set())
        return cls(kind, target, vocab_size, depth, skip_set(says, depth))

    @property
    def size(self) -> ModelSize:
        """No keys and values of its own."""
        config = copy.copy(self.runner.config)
        config.num_hidden_layers = 0
        return ModelSize(config, self.runner.dtype)

    @property
    def parameter_bytes(self) -> int:
        """The LM head's, and what is left of the layers."""
        return part_bytes(self.runner.model, self.last, self.without)

    def reset(self, rows: int, slots: int) -> None:
        self.share(self.runner.pool(rows, slots))

    def share(self, pool: KVPool) -> None:
        self.pool = pool

    @property
    def native(self) -> NativeBody | None:
        return self.runner.native

    def propose(self, request: Round) -> TokenTree:
        runner = self.part(request.plan)
        native = at_once(request, self.native and runner.native, runner.head)
        if native is None:
            return grow(request, self.feed(request))[0]
        lens_B, width = request.lens_B, min(round_up(request.top + 1), self.pool.slots)
        fed = request.pending_B[:, None], lens_B[:, None], lens_B[:, None]
        states_B1H, _ = runner.verify(self.pool, *fed, Seen(lens_B, width))
        where = runner.head, self.pool, runner.context, states_B1H[:, 0]
        return grow_at_once(request, native, *where, None, lens_B + 1)

    def in_rounds(self, nodes: int, temperature: float) -> InRounds | None:
        """Of a part that stays the same, and is told nothing."""
        native, rows, head = self.native, self.pool.rows, self.runner.head
        if native is None or self.hears:
            return None
        if not (native.drafts(head, rows) and native.steps(rows)):
            return None
        drawn = Draws(head, temperature, self.pool, self.runner.context)
        return lm_rounds(native, drawn, None)

    def feed(self, request: Round) -> Feed:
        width = min(round_up(request.top + request.plan.slots), self.pool.slots)
        runner = self.part(request.plan)

        def feed(frontier: Frontier) -> Fed:
            placed = frontier.placed(request.lens_B[:, None], width)
            states_BFH, _ = runner.verify(self.pool, frontier.tokens_BF, *placed)
            return Fed(runner.logits(states_BFH), states_BFH)

        return feed

    def part(self, plan: Plan) -> Runner:
        """What drafts it."""
        return self.runner

    @torch.inference_mode()
    def teacher_logits(self, ids_BT: Tensor, taps_BTU: Tensor | None = None) -> Tensor:
        """Of the part alone, whose keys and values then are its own throughout."""
        return self.runner.logits(self.runner.states(ids_BT)[0])


def part_bytes(model: PreTrainedModel, last: int, without: Collection[Half]) -> int:
    """What a call of a model's first `last` layers without these halves reads, LM head included."""
    total = output_head(model)[1].nbytes
    for index, layer in enumerate(decoder_layers(model)[:last]):
        for name, parameter in layer.named_parameters():
            half = HALVES["attn" not in name and "input" not in name]
            total += bytes_read(parameter) * ((index, half) not in without)
    return total


def units_of(runner: Runner, layers: range) -> list[Unit]:
    """What can be left out of these layers: halves; where a body is transformers' own, layers."""
    halves = [frozenset({(i, half)}) for i in layers for half in HALVES]
    lean = isinstance(runner.call, LeanBody)
    return halves if lean else [a | m for a, m in zip(halves[::2], halves[1::2], strict=True)]


def joined(units: Iterable[Unit]) -> frozenset[Half]:
    return frozenset[Half]().union(*units)


def worth(agreement: float, K: int, c: float) -> float:
    """MBSU of chains of K tokens, of which each agrees with so great a chance: expected tau over 1
    + K c.
    """
    return float(sum(agreement**i for i in range(K + 1)) / (1 + K * c))


def skip_set(says: str, depth: int) -> set[Half]:
    """The halves that `3+5a+6m` names, of so many layers; ValueError for what isn't there, or a set
    that leaves nothing.
    """
    found: set[Half] = set()
    for word in says.split("+"):
        match = re.fullmatch(r"(\d+)([am]?)", word)
        if match is None or int(match[1]) >= depth:
            raise ValueError(
                f"drafter: got skip:{says}, expected layers 0 to {depth - 1} joined by +, each "
                "with a for its attention alone or m for its feed-forward alone: skip:3+5a+6m"
            )
        found |= {(int(match[1]), half) for half in LETTERS[match[2]]}
    if len(found) == 2 * depth:
        raise ValueError(f"drafter: got skip:{says}, which leaves nothing of {depth} layers")
    return found


def skip_name(without: Collection[Half]) -> str:
    """What `skip_set` reads."""
    words = []
    for layer in sorted({layer for layer, _ in without}):
        left = tuple(half for half in HALVES if (layer, half) in without)
        words.append(f"{layer}{next(letter for letter, of in LETTERS.items() if of == left)}")
    return "+".join(words)
