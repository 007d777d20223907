"""A lean body on a few new tokens, a part of a prompt or all of a drafted chain, in one call of C++
(`native.cpp`), on the model's own weights.

A step of a small model on a CPU is mostly torch's dispatch, not arithmetic. This is for bf16, on
one thread, and of larger models on as many as torch has (`crew.h`). Where no compiler is, or for
more tokens or other widths, `lean.py` and `lean_heads.py` go on as they are. It is compared with
them before it is used.

Shapes: B rows, N tokens, K of a chain, H hidden, V vocabulary, A query heads of E numbers.
"""

import copy
import ctypes
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from draftsmith.decode.forward.compiled import library, place, pointer
from draftsmith.decode.forward.compressed import STEP, compressed, follow
from draftsmith.decode.forward.kv import KVPool, SlotCache, laid
from draftsmith.decode.forward.product import ONEDNN, VocabHead, sides
from draftsmith.models.taps import NORM, Tap

HALVES = ("attention", "mlp")  # of a layer: what is added to its input, then to that
Half = tuple[int, str]  # (a layer, one of HALVES)
PARTS = 26  # tensors of a layer
WIDTHS = (32, 64, 96, 128)  # of a head
PIECE = 256  # tokens of prompts that a pass takes
ALONE = 80  # tokens that it, on one thread, is faster with than torch on several
SMALL = 64 << 20  # bytes of layers that one thread reads as fast as torch calls several

_P, _N = ctypes.c_void_p, ctypes.c_int64
LOGITS = ctypes.CFUNCTYPE(None, _P, _P, _P, _N, _P, _P)


class _Body(ctypes.Structure):
    _fields_ = [(n, _N) for n in ("layers", "hidden", "heads", "kv_heads", "width")]
    _fields_ += [(n, _P) for n in ("inner", "embedding", "norm", "cos", "sin")]
    _fields_ += [("epsilon", ctypes.c_double), ("scale", ctypes.c_double), ("layer", _P)]
    _fields_ += [(n, _N) for n in ("pairs", "normed", "fed_normed", "beside")]
    _fields_ += [(n, _P) for n in ("of_token", "of_state", "front", "front_bias")]
    _fields_ += [("threads", _N)]


class PassCall(ctypes.Structure):
    _fields_ = [(n, _N) for n in ("rows", "n", "width", "first", "last")]
    _fields_ += [(n, _P) for n in ("tokens", "positions", "slots", "lens", "block")]
    _fields_ += [("wide", _N), ("block_row", _N), ("given", _P)]
    _fields_ += [("keys", _P), ("values", _P), ("layer_step", _N), ("row_step", _N)]
    _fields_ += [("states", _P), ("out", _P), ("places", _P), ("across", _N)]
    _fields_ += [("tapped", _P), ("taps", _N), ("side", _P)]


class ChainCall(ctypes.Structure):
    _fields_ = [(n, _N) for n in ("steps", "size", "context", "slots", "race_row", "race_step")]
    _fields_ += [("given", _N), *((n, _P) for n in ("head", "bias", "ids", "pending", "race"))]
    _fields_ += [("temperature", ctypes.c_double), ("sure", _P), ("from", _P), ("beside", _N)]
    _fields_ += [("preview", _P)]


class Front(NamedTuple):
    """Of a head that reads a state beside each token: the norms of both, the map (weight, bias) to
    what the first layer reads (None: it reads both), whether that adds to the normed state, whether
    what stands for the next token's state is normed, and whether the map's output is added to the
    state.
    """

    of_token: Tensor | None
    of_state: Tensor | None
    maps: tuple[Tensor | None, Tensor | None] = (None, None)
    normed: bool = False
    fed_normed: bool = False
    beside: bool = False


class NativeBody:
    """What a lean body's call gives, of its layers or those halves of them that it has."""

    def __init__(self, body: Any, made: Any, front: Front | None) -> None:
        self.made, self.layers = made, 1 + body.layers[-1].index
        first = body.layers[0]
        heads, kv_heads, width = first.sizes
        self.hidden = first.exit[2].tensors[0][0].shape[1]
        self.tensors = [body.embedding_VH, weight_of(body.norm), body.cos_SE, body.sin_SE]
        given = {layer.index: parts_of(layer) for layer in body.layers}
        inner = {layer.index: len(layer.exit[2].tensors[0][0]) for layer in body.layers}
        self.inner = (_N * self.layers)(*(inner.get(i, 0) for i in range(self.layers)))
        parts = [part for i in range(self.layers) for part in given.get(i, [None] * PARTS)]
        assert len(parts) == PARTS * self.layers
        self.pointers = (_P * len(parts))(*map(pointer, parts))
        self.small = sum(part.nbytes for part in parts if part is not None) <= SMALL
        self.most = made.most()  # tokens of a pass
        self.longest = sys.maxsize if ONEDNN else PIECE  # tokens of prompts it isn't slow for
        self.front, begin = front, front or Front(None, None)
        matrices = [part for part in (*parts, begin.maps[0]) if part is not None and part.ndim > 1]
        self.compressed = compressed(matrices)
        self.counted = [x.weight for x in self.compressed if not x.weight.is_inference()]
        self.versions: list[int] = []  # of these, none while forms are behind them
        self._body = _Body(
            *(self.layers, self.hidden, heads, kv_heads, width, ctypes.addressof(self.inner)),
            *map(pointer, self.tensors),
            *(first.exit[1].epsilon, first.scale, ctypes.addressof(self.pointers)),
            *(front is not None, begin.normed, begin.fed_normed, begin.beside),
            *map(pointer, (begin.of_token, begin.of_state, *begin.maps)),
        )

    @classmethod
    def of(cls, body: Any, front: Front | None = None) -> "NativeBody | None":
        """The native form of a lean body, or of a lean head's layers; None where there is none."""
        known = fits(body) and (made := library()) is not None
        return cls(body, made, front) if known and made.most() else None

    @property
    def body(self) -> _Body:
        """What C++ is given; weights that have been changed are followed."""
        versions = [weight._version for weight in self.counted]
        if versions != self.versions:
            settled = [form.follow() for form in self.compressed]
            self.versions = versions if all(settled) else []
        self._body.threads = 1 if self.small else torch.get_num_threads()
        return self._body

    def unbound(self) -> "NativeBody":
        """The same for passes of any size, to be tried on."""
        made = copy.copy(self)
        made.most = made.longest = sys.maxsize
        return made

    def reads(self, longest: int) -> bool:
        """Whether prompts of so many tokens at most go through it, PIECE tokens at a time."""
        return longest <= self.longest and (not self.small or torch.get_num_threads() == 1)

    def takes(self, tokens_BN: Tensor, cache: SlotCache) -> bool:
        """Whether a pass is one of those it is for."""
        attend = cache.attend
        if attend is None or cache.flat_slots is None or not self._covers(tokens_BN.numel()):
            return False
        plain = attend.backend == "masked" and attend.seen.at is None
        return plain and type(tokens_BN) is Tensor

    def tapped(
        self, tokens_BN: Tensor, positions_BN: Tensor, cache: SlotCache, taps: Sequence[Tap]
    ) -> tuple[Tensor, Tensor]:
        """The last layer's states, normed, and the taps' side by side, [B, N, U]."""
        side_BNU = cache.pool.kv_2LBSHE.new_empty((*tokens_BN.shape, len(taps) * self.hidden))
        places = numbers_of(taps)
        at = ctypes.addressof(places), len(taps), pointer(side_BNU)
        return self.states(tokens_BN, positions_BN, cache, side=at)[1], side_BNU

    def states(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        cache: SlotCache,
        given_BNH: Tensor | None = None,
        layers: range | None = None,
        side: tuple[Any, ...] = (None, 0, None),
    ) -> tuple[Tensor, Tensor]:
        """What goes into the layers that are run (by default all) and what the last gives, side by
        side, and that normed. given_BNH: the states that a head reads beside the tokens or, without
        an embedding, in their place; side: where `tapped` wants some of them.
        """
        assert cache.attend is not None and cache.flat_slots is not None
        seen, pool, block, sizes = cache.attend.seen, cache.pool, None, (0, 0)
        if seen.block is not None:
            block = seen.block.contiguous()
            sizes = block.shape[-1], block.stride(0) * (block.ndim - 2)
        whole = [x.contiguous() for x in (tokens_BN, positions_BN, cache.flat_slots, seen.lens_B)]
        given_BNH = None if given_BNH is None else given_BNH.contiguous()
        shape, packed = (*tokens_BN.shape, self.hidden), cache.attend.packed
        layers = range(self.layers) if layers is None else layers
        states_LBNH = pool.kv_2LBSHE.new_empty((len(layers) + 1, *shape))
        out_BNH = pool.kv_2LBSHE.new_empty(shape)
        call = PassCall(
            *(*tokens_BN.shape, seen.width, layers.start, layers.stop),
            *(*map(pointer, (*whole, block)), *sizes, pointer(given_BNH)),
            **laid(pool),
        )
        call.states, call.out, call.places = map(pointer, (states_LBNH, out_BNH, packed))
        call.across = cache.attend.positions_BN.shape[1]
        call.tapped, call.taps, call.side = side
        self.made.body(ctypes.byref(self.body), ctypes.byref(call))
        return states_LBNH, out_BNH

    def keep(self, states_BNH: Tensor, positions_BN: Tensor, keep: Any) -> bool:
        """Keep all layers' keys and values of these states in the slots of a cache, where `keep` is
        one, and it is for as many; whether it did.
        """
        if not isinstance(keep, SlotCache) or keep.flat_slots is None:
            return False
        if not self._covers(positions_BN.numel()):
            return False
        states_BNH, positions_BN = states_BNH.contiguous(), positions_BN.contiguous()
        at = positions_BN, keep.flat_slots, states_BNH
        call = PassCall(*positions_BN.shape, last=self.layers, **laid(keep.pool))
        call.positions, call.slots, call.given = map(pointer, at)
        self.made.keep(ctypes.byref(self.body), ctypes.byref(call))
        return True

    def _covers(self, tokens: int) -> bool:
        alone = self.small and torch.get_num_threads() > 1
        return tokens <= (min(self.most, ALONE) if alone else self.most)

    def drafts(self, head: VocabHead, rows: int) -> bool:
        """Whether it drafts chains of so many rows by this LM head."""
        return head.packs and rows <= self.most and head.weight.is_contiguous()

    def steps(self, tokens: int) -> bool:
        """Whether it is a small model that takes so many tokens at a time."""
        return self.small and self._covers(tokens)

    def reads_out(self, head: VocabHead) -> bool:
        """Whether an LM head's logits are a product of C++ too."""
        return head.native is not None

    def step(
        self,
        pool: KVPool,
        at: tuple[Tensor, Tensor, Tensor],
        width: int,
        side_MBNU: Tensor,
        taps: Sequence[Tap],
        *,
        head: VocabHead | None = None,
        temperature: float = 0.0,
        law: Callable[[Tensor], None] | None = None,
    ) -> "NextTokens":
        """The pass over each row's next tokens, and the head's logits over the temperature, or
        `law`, which makes them of the states [B n, H]. at: the tokens [B, N], how many slots they
        see before their own [B], and their positions and slots [2, B, N], which are read when it is
        called, of n <= N; side_MBNU: where the taps' states go, one call's after another's.
        """
        tokens_BN, lens_B, at_2BN = at
        rows, nodes = tokens_BN.shape
        states = pool.kv_2LBSHE.new_empty(self.layers + 2, rows * nodes, self.hidden)
        read, places = map(pointer, (tokens_BN, *at_2BN, lens_B)), numbers_of(taps)
        pass_ = PassCall(rows, nodes, width, 0, self.layers, *read, **laid(pool))
        pass_.states, pass_.out, pass_.side = map(pointer, (states, states[-1], side_MBNU))
        pass_.tapped, pass_.taps = ctypes.addressof(places), len(taps)
        how, failed = ChainCall(beside=side_MBNU.stride(0)), list[BaseException]()
        body = self.body  # once, not in each round
        function: Any = self.made.logits
        if head is not None:
            how.size, how.temperature = len(head.weight), temperature
            follow([head.weight])
            how.head, how.bias = map(pointer, sides(head))
        elif law is not None:

            def held_back(_: Any, error: BaseException | None, __: Any) -> bool:
                failed.extend([] if error is None else [error])
                return True

            def called(_: Any, __: Any, ___: Any, n: int, sees: Any, ____: Any) -> None:
                with ExitStack() as stack:  # nothing is raised through C++, but by who called that
                    stack.push(held_back)
                    if not failed:
                        pass_.n = pass_.wide = n
                        pass_.block, pass_.block_row = sees, n * n
                        self.made.body(ctypes.byref(body), ctypes.byref(pass_))
                        pass_.side = (pass_.side or 0) + side_MBNU[0].nbytes
                        law(states[-1, : rows * n])

            function = LOGITS(called)
        calls = (ctypes.cast(one, _P) for one in (function, self.made.moved))
        given = map(ctypes.byref, (body, pass_, how))
        return NextTokens((states, places, function), failed, (*calls, *given))

    def chain(
        self, head: VocabHead, pool: KVPool, start: "ChainStart", steps: int, *, sure: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Each row's next tokens [B, K], the best by the scores that `choose` takes; and log of the
        share [B, K] that these have of all scores, where that is asked for.
        """
        states = [None if x is None else x.contiguous() for x in start[:2]]
        at_B, race_BKV, temperature, context, pending_B = start[2:]
        at_B = at_B.contiguous()  # held: the call is given its address
        rows, size = len(at_B), len(head.weight)
        follow([head.weight])
        tokens_BK = at_B.new_empty(rows, steps)
        sure_BK = at_B.new_empty(rows, steps, dtype=torch.float32) if sure else None
        strides = (0, 0) if race_BKV is None else race_BKV.stride()[:2]
        how = ChainCall(
            *(steps, size, context, pool.slots, *strides),
            0 if pending_B is None or states[1] is None else states[1].shape[1],
            *map(pointer, (*sides(head), head.ids_D, pending_B, race_BKV)),
            *(temperature, pointer(sure_BK)),
        )
        how.preview = head.previewed
        at = PassCall(rows, 1, pool.slots, last=self.layers, **laid(pool))
        beside = map(place, (*states, at_B, tokens_BK))
        self.made.chain(*map(ctypes.byref, (self.body, at, how)), *beside)
        return tokens_BK, sure_BK


class NextTokens(NamedTuple):
    """A function and what it is called with in C++, all but where the logits go; what that reads,
    which must live as long; and what it failed with.
    """

    held: tuple[Any, ...]
    failed: list[BaseException]
    call: tuple[Any, ...]


class ChainStart(NamedTuple):
    """Where rows' chains begin: what the LM head reads of the last token, the state that stands
    beside the next one (of a head), and that one's position, which is its slot in its row; and how
    their tokens are drawn. context: the positions that there are. pending: tokens that are fed
    first, of a head whose states beside them and all after are known, [B, K, H] in `carried`.
    """

    first_BH: Tensor | None
    carried: Tensor | None
    at_B: Tensor
    race_BKV: Tensor | None
    temperature: float
    context: int
    pending_B: Tensor | None = None


def attends(query_BNAE: Tensor, pool: KVPool) -> bool:
    """Whether `committed` is for such queries: where passes of as many tokens are in C++."""
    fits = query_BNAE.dtype == pool.kv_2LBSHE.dtype == torch.bfloat16
    fits = fits and query_BNAE.device.type == "cpu" and query_BNAE.shape[-1] in WIDTHS
    if not fits or torch.get_num_threads() > 1 or (made := library()) is None:
        return False
    return query_BNAE.shape[:2].numel() <= int(made.most())


def committed(query_BNAE: Tensor, pool: KVPool, layer: int, lens_B: Tensor, width: int) -> Tensor:
    """What queries see in a layer's first `lens` slots of their rows, of which at most `width`:
    [B, N, A, E].
    """
    query_BNAE, lens_B = query_BNAE.contiguous(), lens_B.contiguous()
    rows, many, heads, E = query_BNAE.shape
    body = _Body(heads=heads, kv_heads=pool.kv_2LBSHE.shape[4], width=E, scale=E**-0.5)
    call = PassCall(rows, many, width, lens=pointer(lens_B), **laid(pool))
    call.block = call.lens  # of no slots
    out_BNAE = torch.empty_like(query_BNAE)
    at = _N(layer), *map(place, (query_BNAE, out_BNAE))
    library().attend(ctypes.byref(body), ctypes.byref(call), *at)
    return out_BNAE


def numbers_of(taps: Sequence[Tap]) -> Any:
    """As the C++ counts them."""
    return (_N * len(taps))(*(-1 if tap == NORM else int(tap) for tap in taps))


def parts_of(layer: Any) -> Sequence[Tensor | None]:
    """A lean layer's tensors in the order of `Layer` in native.cpp; None for those of a half that
    is left out.
    """
    first, qkv, *own = layer.entry
    out, after, gate_up, down = layer.exit
    (q, k, v), biases = qkv.tensors[0], qkv.tensors[1] or (None,) * 3
    attention = [weight_of(first), q, k, v, *biases, *map(weight_of, own), *sides(out)]
    halves = attention, [after.weight, *sides(gate_up), *sides(down)]
    made = [
        part if half in layer.halves else None
        for half, parts in zip(HALVES, halves, strict=True)
        for part in parts
    ]
    return [*made, *layer.taps]


def weight_of(norm: Any) -> Tensor | None:
    """Of a norm in the form that bf16 has on a CPU."""
    weight: Tensor | None = getattr(norm, "weight", None)
    return weight


def fits(body: Any) -> bool:
    """Whether every layer is packed and of widths that native.cpp knows."""
    for table in (body.cos_SE, body.embedding_VH):
        if table is not None and (table.device.type, table.dtype) != ("cpu", torch.bfloat16):
            return False
    for layer in body.layers:
        products = (layer.entry[1], layer.exit[0], *layer.exit[2:])
        if not all(getattr(product, "packs", False) for product in products):
            return False
        same = (layer.sizes, layer.scale) == (body.layers[0].sizes, body.layers[0].scale)
        norms = [body.norm, layer.entry[0], *layer.entry[2:]]
        same = same and all(n is None or n.epsilon == layer.exit[1].epsilon for n in norms)
        known = isinstance(layer.activation, nn.SiLU | SiLUActivation)
        inputs = [weight.shape[1] for product in products for weight in product.tensors[0]]
        even = layer.sizes[2] in WIDTHS and all(width % STEP == 0 for width in inputs)
        laid = all(t is None or t.is_contiguous() for t in parts_of(layer))
        if not (same and known and even and laid):
            return False
    return bool(body.layers)
