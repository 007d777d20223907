"""The only code that calls a model while decoding: prefill and verify over per-row KV slots; and on
CUDA the recording of calls, to be replayed.

Works on unmodified transformers classes whose layers keep keys and values of every token, or, of a
target, a state that is known (`mixers.py`). What a pass attends to is handed to each layer's
attention as a keyword; what mixes tokens in the others is put in the place of their forward.

Shapes: B rows, N tokens a row, H hidden, U width of the taps' states side by side, V vocabulary.
"""

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.decode.forward.attention import ATTENTION, Attend, Seen, resolve
from draftsmith.decode.forward.compressed import compressed
from draftsmith.decode.forward.kv import (
    KVPool,
    SlotCache,
    context_of,
    kv_shape,
    query_heads,
    round_up,
    windowed,
)
from draftsmith.decode.forward.lean import (
    LeanBody,
    Taken,
    agree,
    kept_layers,
    lean_body,
    sliced,
)
from draftsmith.decode.forward.mixers import KINDS, mixers_of
from draftsmith.decode.forward.native import HALVES, PIECE, Half, NativeBody
from draftsmith.decode.forward.product import VocabHead
from draftsmith.decode.forward.states import StatePool, mixing
from draftsmith.models.rollback import refuse_what_cannot_roll_back
from draftsmith.models.taps import NORM, Tap, check_taps, joined, parted, watching
from draftsmith.models.target import output_head, unwrapped
from draftsmith.models.vocab import DraftVocab

__all__ = ["Runner", "Seen"]

WARM_UP = 2  # rounds of each kind run as they are before one is recorded: they choose kernels
# (tokens [B, N], positions [B, N], cache, taps to take) -> hidden [B, N, H]
Body = Callable[[Tensor, Tensor, SlotCache, Taken], Tensor]
# States after the final norm [B, N, H], and of the runner's taps [B, N, U], where it has any.
States = tuple[Tensor, Tensor | None]


class Runner:
    """A model, its LM head cut to the tokenizer's size, and the calls that decoding makes.

    model: a causal LM, or a PeftModel around one, whose adapter then stays live. attention: a
    backend of `decode/forward/attention.py`, or "auto". taps: states that each pass gives beside
    the last. vocab: the tokens with logits, whose rows of the LM head are then copied; None: all.
    recurrent: whether layers may keep a state, which only a round's commit changes: of a target.

    ValueError for models that can't be rolled back, whose logits are more than head(hidden), and
    for an attention backend that the machine lacks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocab_size: int,
        attention: str = "auto",
        taps: tuple[Tap, ...] = (),
        vocab: DraftVocab | None = None,
        *,
        recurrent: bool = False,
    ) -> None:
        model = unwrapped(model)
        # Of a target that is split over processes: it tells the others what is done here.
        self.leader: Any = getattr(model, "leader", None)
        self.mixers = mixers_of(model) if recurrent else {}
        refuse_what_cannot_roll_back(model, known=bool(self.mixers))
        self.model = model
        self.body, head_VH, bias_D = output_head(model)
        if head_VH.shape[0] < vocab_size:
            raise ValueError(
                f"model: got {head_VH.shape[0]} logits, expected at least the tokenizer's "
                f"{vocab_size}; this model was made for another tokenizer"
            )
        self.dtype, self.device = head_VH.dtype, head_VH.device
        rows_DH, ids_D = head_VH.detach(), None
        if vocab is not None:
            ids_D = vocab.ids_D.to(self.device)
            rows_DH, bias_D = rows_DH[ids_D], None if bias_D is None else bias_D[ids_D]
        self.head = VocabHead(rows_DH, ids_D, vocab_size, bias_D)
        # Of a target that is split its part's.
        self.config = config = getattr(model, "part_config", model.config.get_text_config())
        check_taps(taps, config.num_hidden_layers)
        self.taps, self.context = taps, context_of(model)
        self.groups = query_heads(config) // kv_shape(config, 1, 1)[4]
        self.attention = resolve(attention, self.device, self.dtype)
        # Also a layer's own, which may have come from another model.
        configs = (getattr(part, "config", None) for part in model.modules())
        found = {id(one): one for one in configs if isinstance(one, PreTrainedConfig)}
        self.configs = list(found.values())
        self.call: Body = self._whole
        # The lean body knows no windows.
        lean = None if windowed(config) else lean_body(self.body)
        if lean is not None:
            lean.leader = self.leader
            self._use(lean)
        if self.mixers:
            self._check_mixers()

    def compile(self, **options: Any) -> None:
        """Compile the lean body's layers, where the model has one; options of `torch.compile`."""
        if isinstance(self.call, LeanBody):
            self.call.compile(**options)

    def pool(self, rows: int, slots: int) -> KVPool:
        """A KV pool for this model; the slots are rounded up to whole buckets."""
        pool = KVPool(
            self.config, rows=rows, slots=round_up(slots), dtype=self.dtype, device=self.device
        )
        if self.leader is not None:
            pool.mirror = self.leader.opened(pool)
        if self.mixers:
            pool.states = StatePool(self.mixers, rows, self.device)
        return pool

    def prefill(
        self, pool: KVPool, rows_B: Tensor, tokens_BN: Tensor, lens_B: Tensor
    ) -> tuple[Tensor, Tensor | tuple[Tensor, ...] | None]:
        """Write prompts (right-padded to N) into the slots of `rows_B`, garbage beyond their
        lengths; the logits [B, V] after each, and the taps' states, where there are taps: of each
        prompt [n, U], or [B, N, U] with anything beyond lengths.
        """
        hidden, taps = self._prompts(pool, rows_B, tokens_BN, lens_B)
        if isinstance(taps, list):
            each = parted(taps, lens_B.tolist()) if taps else None
            return self.logits(hidden[lens_B.cumsum(0) - 1]), each
        last_B11 = (lens_B - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
        return self.logits(hidden.gather(1, last_B11)[:, 0]), taps

    def _prompts(
        self, pool: KVPool, rows_B: Tensor, tokens_BN: Tensor, lens_B: Tensor
    ) -> States | tuple[Tensor, list[Tensor]]:
        native = self.native if self.attention == "masked" else None
        if native is not None and native.reads(tokens_BN.shape[1]):
            return self._in_pieces(pool, rows_B, tokens_BN, lens_B)
        positions_BN = torch.arange(tokens_BN.shape[1], device=self.device).expand_as(tokens_BN)
        cache = SlotCache(pool, (rows_B[:, None] * pool.slots + positions_BN).flatten(), prefix=0)
        if pool.states is not None:
            cache.mix = partial(pool.states.prefill, rows_B, lens_B)
        return self._pass(tokens_BN, positions_BN, cache)

    def _in_pieces(
        self, pool: KVPool, rows_B: Tensor, tokens_BN: Tensor, lens_B: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Prompts without their padding, one after another, PIECE tokens a pass: [M, H], and the
        taps' states in pieces.
        """
        real_BN = torch.arange(tokens_BN.shape[1]) < lens_B[:, None]
        own_M, at_M = real_BN.nonzero(as_tuple=True)
        found = []
        for own, at in zip(own_M.split(PIECE), at_M.split(PIECE), strict=True):
            row, begins = rows_B[own], lens_B.new_zeros(pool.rows)
            begins = begins.scatter_reduce(0, row, at, "amin", include_self=False)
            packed, slots_RP = row * PIECE + at - begins[row], begins[:, None] + torch.arange(PIECE)
            fed_RP = torch.zeros_like(slots_RP).put_(packed, tokens_BN[own, at])
            seen = Seen(begins, int(at.max()) + 1)
            found.append(self.verify(pool, fed_RP, slots_RP, slots_RP, seen, packed=packed))
        taps = [taps_1NU[0] for _, taps_1NU in found if taps_1NU is not None]
        return torch.cat([hidden for hidden, _ in found], 1)[0], taps

    def verify(
        self,
        pool: KVPool,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        slots_BN: Tensor,
        seen: Seen,
        *,
        taps: bool = True,
        packed: Tensor | None = None,
    ) -> States:
        """States of new tokens of rows 0..B-1 that go to `slots_BN`; each sees what `seen` says.
        taps: whether those are wanted. packed: the places [M] in [B * N] of the only ones that are
        fed; the states are then [1, M, ...].
        """
        # What lies past the context's end is never kept; it only must not overrun the tables.
        positions_BN = positions_BN.clamp(max=self.context - 1)
        attend = Attend(
            seen, positions_BN, groups=self.groups, dtype=self.dtype, backend=self.attention
        )
        attend.packed = packed
        slots, fed = pool.flat(slots_BN), [tokens_BN, positions_BN]
        if packed is not None:
            slots, fed = slots[packed], [x.flatten()[packed][None] for x in fed]
        # The flash call reads whole rows of the pool by their lengths.
        width = pool.slots if self.attention == "varlen" else seen.width
        cache = SlotCache(pool, slots, width, attend)
        if pool.states is not None:
            cache.mix = partial(pool.states.verify, pool.states.tree(seen.block, tokens_BN))
        return self._pass(fed[0], fed[1], cache, taps=taps)

    def again(
        self,
        pool: KVPool,
        tokens_BN: Tensor,
        at_BN: Tensor,
        seen: Seen,
        backend: str = "masked",
    ) -> tuple[Tensor, list[Tensor]]:
        """States [B, N, H] of tokens whose keys and values are in slots `at_BN` already: nothing is
        written. With the backend "watched" also what each slot weighed in each layer, [B, K, S],
        summed over the tokens and over the heads of a group.
        """
        attend = Attend(seen, at_BN, groups=self.groups, dtype=self.dtype, backend=backend)
        cache = SlotCache(pool, None, seen.width, attend)
        return self._pass(tokens_BN, at_BN, cache)[0], attend.weights

    def part(
        self, last: int, without: Collection[Half] = (), taps: tuple[Tap, ...] = ()
    ) -> "Runner":
        """The model's first `last` layers without these halves, then its final norm and LM head: a
        runner on the same weights and on the same layers' slots of a pool. What it writes is the
        model's own up to the first half that is left out. ValueError for layers that it hasn't, and
        for a body whose first layers alone compute something else.
        """
        depth = self.config.num_hidden_layers
        if self.leader is not None:
            raise in_parts("layers of the target")
        wrong = [half for half in without if not (0 <= half[0] < last and half[1] in HALVES)]
        if not 0 <= last <= depth or wrong:
            raise ValueError(
                f"layers: got the first {last} without {sorted(wrong)}, expected 0 to {depth} of "
                f"this model, and halves of these ({' or '.join(HALVES)})"
            )
        part = copy.copy(self)
        part.taps = taps
        if isinstance(self.call, LeanBody):
            part.call = self.call.part(last, without)
        else:
            part.body = body = sliced(self.body, kept_layers(last, without), without)
            part.configs = [*self.configs, body.config]
            part.call = part._whole
        if not without and not self._begins_with(part, last):
            raise ValueError(
                f"model {type(self.model).__name__}: got first {last} layers that alone compute "
                "something else than inside the model, expected the same states; use a drafter of "
                "its own for this target"
            )
        return part

    def _begins_with(self, part: "Runner", last: int) -> bool:
        whole, own = copy.copy(self), copy.copy(part)
        whole.taps = own.taps = (last,)
        if not isinstance(self.call, LeanBody):
            whole.call, own.call = whole._whole, own._whole
        return agree(whole._trial()[2:], own._trial()[2:], self.dtype)

    def states(self, ids_BT: Tensor) -> States:
        """Of whole texts, in slots of their own."""
        rows_B = torch.arange(len(ids_BT), device=self.device)
        lens_B = torch.full_like(rows_B, ids_BT.shape[1])
        hidden, taps = self._prompts(self.pool(*ids_BT.shape), rows_B, ids_BT, lens_B)
        if isinstance(taps, list):
            taps = torch.cat(taps) if taps else None
        shape = *ids_BT.shape, -1
        return hidden.reshape(shape), None if taps is None else taps.reshape(shape)

    def _pass(
        self, tokens_BN: Tensor, positions_BN: Tensor, cache: SlotCache, *, taps: bool = True
    ) -> States:
        wanted, native = self.taps if taps else (), self.native
        if wanted and native is not None and native.takes(tokens_BN, cache):
            return native.tapped(tokens_BN, positions_BN, cache, wanted)
        taken: Taken = {int(tap): None for tap in wanted if tap != NORM}
        hidden_BNH = self.call(tokens_BN, positions_BN, cache, taken)
        return hidden_BNH, joined(wanted, hidden_BNH, taken) if wanted else None

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] fp32 over the tokenizer's vocabulary; -inf for tokens that have none."""
        return self.head.logits(hidden)

    def _whole(
        self, tokens_BN: Tensor, positions_BN: Tensor, cache: SlotCache, taken: Taken
    ) -> Tensor:
        """transformers' own forward of the body."""
        extra = {}
        if cache.attend is not None:
            # A mask of four dimensions is handed through, so the model makes none of its own.
            extra = {"attend": cache.attend, "attention_mask": positions_BN[:, None, :, None]}
        inputs = {"input_ids": tokens_BN, "position_ids": positions_BN, "past_key_values": cache}
        watched = watching(self.model, taken) if taken else nullcontext()
        with self._attending(), mixing(self.mixers, cache.mix), watched:
            hidden_BNH: Tensor = self.body(**inputs, use_cache=True, **extra).last_hidden_state
        return hidden_BNH.to(self.dtype)  # Mamba-2's residual stream may be wider

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """While it lasts the model's layers attend to slots; else as they were told to."""
        before = [config._attn_implementation_internal for config in self.configs]
        for config in self.configs:
            config._attn_implementation_internal = ATTENTION
        try:
            yield
        finally:
            for config, name in zip(self.configs, before, strict=True):
                config._attn_implementation_internal = name

    @property
    def native(self) -> NativeBody | None:
        """Its layers in one call of C++, if there is such a thing."""
        return self.call.native if isinstance(self.call, LeanBody) else None

    def _use(self, lean: LeanBody) -> None:
        """Call it from now on, if it gives the model's own states; in C++ if that does too."""
        own, fast = copy.copy(self), copy.copy(self)
        own.taps = fast.taps = ()
        own.call, fast.call = own._whole, lean
        wanted = own._trial()
        if not agree(wanted, fast._trial(), self.dtype):
            return
        self.call, native = lean, NativeBody.of(lean) if self.leader is None else None
        if native is not None:
            lean.native = native.unbound()
            lean.native = native if agree(wanted, fast._trial(), self.dtype) else None
            native.compressed += compressed([self.head.weight])

    @torch.inference_mode()
    def _check_mixers(self) -> None:
        """ValueError where four tokens of a prompt and three after it aren't the model's own."""
        ids_1T = torch.arange(7, device=self.device)[None] % len(self.head.weight)
        own_1TH = self.body(input_ids=ids_1T, use_cache=False).last_hidden_state
        pool, lens_1 = self.pool(1, 8), torch.full((1,), 4, device=self.device)
        row_1, at_1N = torch.zeros_like(lens_1), torch.arange(4, 7, device=self.device)[None]
        first_1NH, _ = self._prompts(pool, row_1, ids_1T[:, :4], lens_1)
        next_1NH, _ = self.verify(pool, ids_1T[:, 4:], at_1N, at_1N, Seen(lens_1, pool.slots))
        if not agree([own_1TH], [torch.cat([first_1NH, next_1NH], 1)], self.dtype):
            raise ValueError(
                f"model {type(self.model).__name__}: got layers with a state that compute "
                f"something else than {sorted(KINDS)}, expected the states of its own forward; use "
                "a target of another family"
            )

    @torch.inference_mode()
    def _trial(self) -> list[Tensor]:
        """Two ragged prompts, then three tokens each: logits after the prompts and states of the
        tokens, and the taps of both where there are any.
        """
        lens_B = torch.tensor([7, 4], device=self.device)
        tokens_BN = torch.arange(14, device=self.device).view(2, 7) % len(self.head.weight)
        rows_B, pool = torch.arange(2, device=self.device), self.pool(2, 16)
        logits_BV, prompt = self.prefill(pool, rows_B, tokens_BN, lens_B)
        positions_BN = lens_B[:, None] + torch.arange(3, device=self.device)
        seen = Seen(lens_B, pool.slots)
        states = self.verify(pool, tokens_BN[:, :3], positions_BN, positions_BN, seen)
        if isinstance(prompt, Tensor):
            prompt = (prompt[torch.arange(7, device=self.device) < lens_B[:, None]],)
        prompt_MU = torch.cat(prompt) if prompt is not None else None
        found = [logits_BV.masked_fill(logits_BV.isneginf(), 0), *states, prompt_MU]
        return [state.float() for state in found if state is not None]


class CudaRecorder:
    """Captures into CUDA graphs that share one pool of memory. What a recording reads must outlive
    it: a batch, its decoder and its drafter do.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Any]) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            told = run()

        def replay() -> Any:
            graph.replay()
            return told

        return replay


def in_parts(what: str) -> ValueError:
    """That a drafter wants more of a target than the part that one process has."""
    return ValueError(
        f"parallel: got a drafter of {what} with a target that is split over processes, expected a "
        "draft LM, a head or what is looked up; use parallel=1"
    )
