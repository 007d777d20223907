"""A training step without its memory: every tensor has a shape and a size, and no storage.

torch's FakeTensorMode runs the very modules of a run, whatever their family; here their tensors are
counted as they come and go. So what a step will hold is known before anything is loaded, with the
copies that autocast makes, what attention keeps for its backward, and what is computed again under
gradient checkpointing. What depends on data is answered as for the fullest batch (`WithoutData`).
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from draftsmith.train.losses.chunked import CHUNK_LOGITS, TILE_LOGITS

aten = torch.ops.aten
MOST_TILES = 256  # larger ones than on a CPU: by 2% of the logits in fp32
# torch's own table lacks the CPU's attention, which is what runs here: its products of length by
# length, and which argument is the queries.
CPU_ATTENTION: dict[Any, tuple[int, int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (2, 0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (5, 1),
}


class WithoutData(TorchDispatchMode):
    """While it lasts, fake tensors answer what only data could.

    yes: a truth value is true (-inf is among the logits, say) and so is a mask, everywhere: as of
    the fullest batch. Otherwise they are false: what a check looks for isn't there. Either way a
    measured number is 0, and what is cut out by a mask is all that there is.
    """

    yes = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is aten._local_scalar_dense.default:
            kind = args[0].dtype
            if kind == torch.bool or kind.is_floating_point:
                return self.yes if kind == torch.bool else 0.0
        elif func is aten.nonzero.default:
            return args[0].new_zeros(args[0].numel() * self.yes, args[0].ndim, dtype=torch.int64)
        elif func is aten.sum.default and args[0].dtype == torch.bool:
            return torch.tensor(args[0].numel() * self.yes)
        elif func is aten.index.Tensor:
            args = (args[0], [place for at in args[1] for place in _places(at)])
        return func(*args, **(kwargs or {}))


def _places(index: Tensor | None) -> Sequence[Tensor | None]:
    """An index of `aten.index`; of a mask that is true everywhere, the places that it names."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return index.new_zeros(index.ndim, index.numel(), dtype=torch.int64).unbind()


class Step(WithoutData):
    """What an optimizer step's passes hold and cost, counted while they run.

    at: bytes of new tensors alive after each one, as (all but gradients of weights, these);
    gradients: all of these; flops: of a micro-batch's matrix products, 2 a multiply-add, attention
    counted in full.
    """

    yes = True

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.total = self.gradients = self.flops = 0
        self.at: list[tuple[int, int]] = [(0, 0)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if func in CPU_ATTENTION:
            products, first = CPU_ATTENTION[func]
            self.flops += 2 * products * args[first].numel() * args[first + 1].shape[2]
        elif known := flop_registry.get(func._overloadpacket):
            self.flops += int(known(*args, **(kwargs or {}), out_val=made))
        for storage in (x.untyped_storage() for x in tree_leaves(made) if isinstance(x, Tensor)):
            key = storage._cdata
            if key not in self.sizes:
                self.sizes[key] = storage.nbytes()
                self.total += storage.nbytes()
                self.at.append((self.total - self.gradients, self.gradients))
                weakref.finalize(storage, self._drop, key).atexit = False
        return made

    def _drop(self, key: int) -> None:
        self.total -= self.sizes.pop(key)

    def peak(self, share: float) -> tuple[int, int]:
        """The fullest moment as (all but gradients, gradients), `share` of these being kept."""
        other, gradients = max(self.at, key=lambda moment: moment[0] + share * moment[1])
        return other, int(share * gradients)


def rehearse(
    story: Callable[[], Tensor], trained: Sequence[nn.Parameter], *, autocast: bool, micros: int
) -> Step:
    """Run forward and backward of `story`, which gives a loss, on fake tensors; micros: how often,
    but what more than two micro-batches would hold is what two hold.
    """
    step, awaited, micros = Step(), {id(p) for p in trained}, min(micros, 2)

    def arrived(parameter: Tensor) -> None:
        if id(parameter) in awaited and parameter.grad is not None:
            awaited.remove(id(parameter))
            step.gradients += parameter.grad.nbytes

    hooks = [p.register_post_accumulate_grad_hook(arrived) for p in trained]
    with step:
        for _ in range(micros):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = story()
            loss.backward()
            del loss
    for hook, parameter in zip(hooks, trained, strict=True):
        hook.remove()
        parameter.grad = None
    step.flops //= micros
    return step


@contextmanager
def sweeping_as_on(device: str, logits: int) -> Iterator[None]:
    """Fake tensors are the CPU's: losses over so many logits are swept in chunks of the size for
    `device`, and in its tiles, or in `MOST_TILES` where these would be more and take minutes.
    """
    tile = max(TILE_LOGITS[device], logits // MOST_TILES)
    with patch.dict(CHUNK_LOGITS, cpu=CHUNK_LOGITS[device]), patch.dict(TILE_LOGITS, cpu=tile):
        yield


def measured_peak(work: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """Bytes that `work` really holds at its fullest, beyond what is allocated before it, by CUDA's
    allocator, or on the CPU by every allocation that torch's profiler sees.
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
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0))
