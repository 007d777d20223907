"""A training step without its memory: every tensor has a shape and a size, and no storage.

torch's FakeTensorMode runs the very modules of a run, whatever their family; here their tensors are
counted as they come and go. So what a step will hold is known before anything is loaded, with the
copies that autocast makes, what attention keeps for its backward, and what is computed again under
gradient checkpointing. What depends on data is answered as for the fullest batch (`WithoutData`).
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from draftsmith.train.losses import chunked
from draftsmith.train.losses.chunked import CHUNK_LOGITS, TILE_LOGITS

aten = torch.ops.aten
GRADIENTS = "gradients"
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


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, Tensor)]


class Moment(NamedTuple):
    """Bytes of new tensors that are alive together, by where they were made."""

    parts: dict[str, int]

    @property
    def gradients(self) -> int:
        return self.parts.get(GRADIENTS, 0)

    def size(self, share: float) -> float:
        """All of them, with `share` of the weights' gradients."""
        return sum(self.parts.values()) - (1 - share) * self.gradients


class Step(WithoutData):
    """What an optimizer step's passes hold and cost, counted while they run.

    at: the moment after each new tensor; flops: of a micro-batch's matrix products, 2 a
    multiply-add, attention counted in full.

    Parts: gradients of weights; the target's pass; weights' copies in the low type, as autocast
    makes them; the losses' sweep over the vocabulary (logits, copies of LM heads, its gradients);
    other activations of the forward; what else the backward makes.
    """

    yes = True

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, tuple[str, int]] = {}
        self.parts: Counter[str] = Counter()
        self.flops = 0
        self.at = [Moment({})]
        self.part = "activations"

    @contextmanager
    def making(self, part: str) -> Iterator[None]:
        """While it lasts, new tensors are of this part."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def named(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose tensors are of this part."""

        @wraps(work)
        def inside(*given: Any, **named: Any) -> Any:
            with self.making(part):
                return work(*given, **named)

        return inside

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if func in CPU_ATTENTION:
            products, first = CPU_ATTENTION[func]
            self.flops += 2 * products * args[first].numel() * args[first + 1].shape[2]
        elif known := flop_registry.get(func._overloadpacket):
            self.flops += int(known(*args, **(kwargs or {}), out_val=made))
        copied = func is aten._to_copy.default and isinstance(args[0], nn.Parameter)
        part = "weights' copies" if copied and self.part == "activations" else self.part
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(made):
            key = storage._cdata
            # A view, of a weight say, is nothing new.
            if key not in self.sizes and key not in given:
                self.sizes[key] = part, storage.nbytes()
                self.parts[part] += storage.nbytes()
                self.at.append(Moment(dict(self.parts)))
                weakref.finalize(storage, self._drop, key).atexit = False
        return made

    def _drop(self, key: int) -> None:
        part, size = self.sizes.pop(key)
        self.parts[part] -= size

    def arrived(self, gradient: Tensor) -> None:
        """This tensor turns out to be a weight's gradient."""
        key = gradient.untyped_storage()._cdata
        part, size = self.sizes[key]
        self.sizes[key] = GRADIENTS, size
        self.parts[part] -= size
        self.parts[GRADIENTS] += size

    def peak(self, share: float) -> Moment:
        """The fullest moment, `share` of the gradients being kept."""
        return max(self.at, key=lambda moment: moment.size(share))


def rehearse(
    story: Callable[[], Tensor],
    trained: Sequence[nn.Parameter],
    frozen: nn.Module | None,
    *,
    autocast: bool,
    micros: int,
) -> Step:
    """Run forward and backward of `story`, which gives a loss, on fake tensors; frozen: the
    target's body; micros: how often, but what more than two micro-batches would hold is what two
    hold.
    """
    step, awaited, micros = Step(), {id(p) for p in trained}, min(micros, 2)

    def arrived(parameter: Tensor) -> None:
        if id(parameter) in awaited and parameter.grad is not None:
            awaited.remove(id(parameter))
            step.arrived(parameter.grad)

    hooks = [p.register_post_accumulate_grad_hook(arrived) for p in trained]
    swept = patch.object(chunked, "_sweep", step.named("losses", chunked._sweep))
    passed: Any = nullcontext()
    if frozen is not None:
        passed = patch.object(frozen, "forward", step.named("target's pass", frozen.forward))
    with step, swept, passed:
        for _ in range(micros):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = story()
            with step.making("backward"):
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
