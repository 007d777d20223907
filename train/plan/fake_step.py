"""A training step without its memory: every tensor has a shape and a size, and no storage.

torch's FakeTensorMode runs the very modules of a run, whatever their family; here their tensors are
counted as they come and go. So what a step will hold is known before anything is loaded, with the
copies that autocast makes, what attention keeps for its backward, and what is computed again under
gradient checkpointing. Only the chunked losses need a stand-in, since how many rows they have
depends on data: it makes the same buffers, all rows counted as trained.

Legend: N rows (positions of a batch), S states a row is compared with (steps of EAGLE), C rows of
a chunk, H / G hidden size of the draft / the target, V vocabulary.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from draftsmith.train.losses.chunked import CHUNK_LOGITS, TILE_LOGITS, add_head_gradient
from draftsmith.train.losses.closed_form import BUFFERS

aten = torch.ops.aten


class Live(TorchDispatchMode):
    """While it lasts: bytes of the new tensors that are alive, and FLOPs of matrix products.

    `at` lists what was alive after each new tensor, as (all but gradients, gradients of weights).
    """

    def __init__(self, trained: Iterable[nn.Parameter] = ()) -> None:
        super().__init__()
        self.trained = list(trained)
        self.sizes: dict[int, int] = {}
        self.total = self.gradients = self.flops = 0
        self.at: list[tuple[int, int]] = [(0, 0)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, made)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.total += storage.nbytes()
            self.at.append((self.total - self.gradients, self.gradients))
            weakref.finalize(storage, self._drop, key).atexit = False

    def _drop(self, key: int) -> None:
        self.total -= self.sizes.pop(key)

    def watch(self) -> list[Any]:
        """Tell the gradients of `trained` from the rest as they come; returns hooks to remove."""
        seen: set[int] = set()

        def arrived(parameter: Tensor) -> None:
            if id(parameter) not in seen and parameter.grad is not None:
                seen.add(id(parameter))
                self.gradients += parameter.grad.nbytes

        return [p.register_post_accumulate_grad_hook(arrived) for p in self.trained]


@dataclass(frozen=True)
class Step:
    """What one optimizer step's passes hold and cost.

    at: bytes alive at each moment, apart from all weights and what else outlives a step, as (all
    but gradients, gradients); gradients: all of them; flops: of a micro-batch.
    """

    at: list[tuple[int, int]] = field(repr=False)
    gradients: int
    flops: int

    def peak(self, share: float) -> tuple[int, int]:
        """The fullest moment as (all but gradients, gradients), `share` of these being kept."""
        other, gradients = max(self.at, key=lambda moment: moment[0] + share * moment[1])
        return other, int(share * gradients)


def rehearse(
    story: Callable[[], Tensor], trained: Sequence[nn.Parameter], *, autocast: bool, micros: int
) -> Step:
    """Run forward and backward of `story`, which gives a loss, on fake tensors.

    micros: micro-batches of the step; what more than two would hold is what two hold.
    """
    live = Live(trained)
    hooks = live.watch()
    with live:
        for _ in range(min(micros, 2)):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = story()
            loss.backward()
            del loss
    for hook in hooks:
        hook.remove()
    for parameter in trained:
        parameter.grad = None
    return Step(live.at, live.gradients, live.flops // min(micros, 2))


def chunked_stand_in(
    hidden_SNH: Sequence[Tensor],
    head_VH: Tensor,
    states_NG: Tensor | None,
    p_head_VG: Tensor | None,
    *,
    device: str,
    tiles: int = 0,
) -> Tensor:
    """In place of a chunked loss: its buffers, gradients and products, and a total to go back from.

    Args:
        hidden_SNH, head_VH: as in `chunked_steps`; S = 1 is `chunked_divergence`.
        states_NG, p_head_VG: the target's; None: cross-entropy with the text.
        device: whose chunks and tiles.
        tiles: how many more tiles the transform and the loss hold.
    """
    return _StandIn.apply(head_VH, states_NG, p_head_VG, (device, tiles), *hidden_SNH)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head_VH: Tensor,
        states_NG: Tensor | None,
        p_head_VG: Tensor | None,
        how: tuple[str, int],
        *hidden_SNH: Tensor,
    ) -> Tensor:
        low = ctx.head_type = head_VH.dtype
        if torch.is_autocast_enabled("cpu"):
            low = torch.get_autocast_dtype("cpu")
        d_hidden = [
            torch.zeros_like(hidden_NH) if wanted else None
            for hidden_NH, wanted in zip(hidden_SNH, ctx.needs_input_grad[4:], strict=True)
        ]
        d_head_VH = None
        if ctx.needs_input_grad[0]:
            d_head_VH = torch.zeros_like(head_VH, dtype=torch.float32)
        with torch.autocast("cpu", enabled=False):
            p = None
            if states_NG is not None and p_head_VG is not None:
                p = (states_NG.to(low), p_head_VG.to(low))
            _sweep(hidden_SNH, head_VH.to(low), p, d_head_VH, how)
        ctx.gradients = (d_head_VH, d_hidden)
        return head_VH.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        (d_head, d_hidden), ctx.gradients = ctx.gradients, None
        return (None if d_head is None else d_head.to(ctx.head_type), None, None, None, *d_hidden)


def _sweep(
    hidden_SNH: Sequence[Tensor],
    head_VH: Tensor,
    p: tuple[Tensor, Tensor] | None,
    d_head_VH: Tensor | None,
    how: tuple[str, int],
) -> None:
    """The buffers and products of all chunks."""
    device, tiles = how
    steps, rows, vocab = len(hidden_SNH), len(hidden_SNH[0]), len(head_VH)
    chunk = min(rows, max(1, CHUNK_LOGITS[device] // (steps * vocab)))
    tile = min(chunk, max(1, TILE_LOGITS[device] // vocab))
    wide = 2 if p is not None and head_VH.dtype != torch.float32 else 0
    logits_CV = head_VH.new_empty(steps * chunk, vocab)
    p_logits_CV = None if p is None else head_VH.new_empty(chunk, len(p[1]))
    work = head_VH.new_empty(BUFFERS + (steps > 1), tile, vocab, dtype=torch.float32)
    for first in range(0, rows, chunk):
        at = slice(first, min(first + chunk, rows))
        hidden_CH = torch.cat([hidden_NH[at] for hidden_NH in hidden_SNH]).to(head_VH.dtype)
        some = len(hidden_CH)
        if p is not None and p_logits_CV is not None:
            states_CG = p[0][at].clone()
            torch.mm(states_CG, p[1].t(), out=p_logits_CV[: len(states_CG)])
        torch.mm(hidden_CH, head_VH.t(), out=logits_CV[:some])
        more = work.new_empty(wide + tiles, tile, vocab)
        del more
        torch.mm(logits_CV[:some], head_VH)
        if d_head_VH is not None:
            add_head_gradient(d_head_VH, logits_CV[:some], hidden_CH)


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> int:
    """FLOPs of one operator: 2 a multiply-add of a matrix product, attention counted in full."""
    if func in CPU_ATTENTION:
        products, first = CPU_ATTENTION[func]
        (rows, heads, length, width), keys = args[first].shape, args[first + 1].shape[2]
        return int(2 * products * rows * heads * length * keys * width)
    known = flop_registry.get(func._overloadpacket)
    return int(known(*args, **kwargs, out_val=made)) if known else 0


# torch's own table lacks the CPU's attention, which is what runs here: its products of length by
# length, and which argument is the queries.
CPU_ATTENTION: dict[Any, tuple[int, int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (2, 0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (5, 1),
}


def measured_peak(work: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """Bytes that `work` really holds at its fullest, beyond what is allocated before it.

    On CUDA the allocator's own counter; on the CPU every allocation, as torch's profiler sees it.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    assert seen.profiler is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak
