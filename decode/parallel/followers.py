"""A target whose layers are split over processes, decoded by one of them.

One process leads: it alone reads prompts, drafts, verifies and decides, by clocks too. The others
follow: each has its part of the layers and of their keys and values, and repeats what is done to
these as it is told. So nothing that is decided can differ between them, and all that decodes does
so with a split target as with a whole one.

    python -m draftsmith.decode.parallel.followers RANK PARTS PORT DEVICE      (as `lead` starts it)

Shapes: B rows, N tokens, R rows of a pool.
"""

import atexit
import gc
import os
import signal
import subprocess
import sys
import weakref
from collections import deque
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.forward.attention import BACKENDS, Attend, Seen
from draftsmith.decode.forward.kv import KVPool, SlotCache
from draftsmith.decode.forward.lean import LeanBody
from draftsmith.decode.forward.product import lay_side_by_side
from draftsmith.decode.forward.runner import Runner
from draftsmith.models.fingerprint import remember_body
from draftsmith.models.split import Summed, split_over
from draftsmith.models.target import TargetSpec, device_of, load_target
from draftsmith.models.tokenizer import vocab_size

LOAD, DROP, OPEN, CLOSE, PASS, TEXT, COMMIT, CLEAR = range(8)
NUMBERS, TENSORS, DIMS = 10, 8, 3  # of a message: numbers, tensors, dimensions of each
ATTENTION = list(BACKENDS)
HERE = "127.0.0.1"
# They meet in seconds. Then a server may be idle for long; one that ended is noticed at once.
MEETING, IDLE = timedelta(minutes=5), timedelta(days=365)
TEXT_INPUTS = ("input_ids", "attention_mask", "position_ids")
_started: list["subprocess.Popen[bytes]"] = []  # the followers of this process


class Order(NamedTuple):
    """What followers are told: numbers, the first of which says what to do, and tensors."""

    numbers: tuple[int, ...]
    tensors: tuple[Tensor | None, ...] = ()

    def send(self, device: torch.device) -> None:
        header = torch.full((NUMBERS + TENSORS * DIMS,), -1)
        header[: len(self.numbers)] = torch.tensor(self.numbers)
        for place, tensor in enumerate(self.tensors):
            if tensor is not None:
                at = NUMBERS + DIMS * place
                header[at : at + tensor.ndim] = torch.tensor(tensor.shape)
        dist.broadcast(header, 0)
        if parts := [x.to(torch.int64).flatten() for x in self.tensors if x is not None]:
            dist.broadcast(torch.cat(parts).to(device), 0, group=Summed.group)

    @classmethod
    def next(cls, device: torch.device) -> "Order":
        header = torch.empty(NUMBERS + TENSORS * DIMS, dtype=torch.int64)
        dist.broadcast(header, 0)
        numbers, dims = header[:NUMBERS].tolist(), header[NUMBERS:].view(-1, DIMS).tolist()
        shapes = [torch.Size(n for n in each if n >= 0) for each in dims]
        sizes = [shape.numel() if shape else 0 for shape in shapes]
        parts = torch.empty(sum(sizes), dtype=torch.int64, device=device)
        if any(shapes):
            dist.broadcast(parts, 0, group=Summed.group)
        found = zip(parts.split(sizes), shapes, strict=True)
        return cls(tuple(numbers), tuple(x.view(shape) if shape else None for x, shape in found))


class Leader:
    """Tells the followers what is done to one target. Its model, runners and pools have it."""

    number_of: ClassVar = count()
    gone: ClassVar[deque[tuple[int, int]]] = deque()  # models and pools that nobody holds any more

    def __init__(self, model: PreTrainedModel) -> None:
        self.number, self.device = next(self.number_of), model.device
        weakref.finalize(self, self.gone.append, (DROP, self.number))

    def tell(self, do: int, *numbers: int, tensors: tuple[Tensor | None, ...] = ()) -> None:
        while self.gone:
            Order(self.gone.popleft()).send(self.device)
        Order((do, self.number, *numbers), tensors).send(self.device)

    def opened(self, pool: KVPool) -> "Mirror":
        """Open the same pool in every follower."""
        mirror = Mirror(self)
        self.tell(OPEN, mirror.number, pool.rows, pool.slots)
        return mirror

    def passing(self, tokens_BN: Tensor, at_BN: Tensor, cache: SlotCache, *, lean: bool) -> None:
        """A pass over slots, by the lean body or by transformers' own."""
        attend, mirror = cache.attend, cache.pool.mirror
        assert mirror is not None, "a pool of this target"
        numbers: tuple[int, ...] = mirror.number, *rows_of(cache.pool), cache.prefix, int(lean)
        what: tuple[Tensor | None, ...] = tokens_BN, at_BN, cache.flat_slots
        if attend is not None:
            seen = attend.seen
            assert seen.at is None and attend.backend in ATTENTION, "what is asked of a target"
            numbers += ATTENTION.index(attend.backend), seen.width
            what += seen.lens_B, seen.block, seen.depth, attend.positions_BN, attend.packed
        self.tell(PASS, *numbers, tensors=what)

    def before(self, body: Any, args: Any, given: dict[str, Any]) -> None:
        """transformers' own forward of the body: over slots, or of whole texts."""
        cache = given.get("past_key_values")
        if isinstance(cache, SlotCache):
            self.passing(given["input_ids"], given["position_ids"], cache, lean=False)
        else:
            assert not args, "inputs have names"
            self.tell(TEXT, tensors=tuple(map(given.get, TEXT_INPUTS)))


class Mirror:
    """Tells the followers what is done to a pool. Its copies share it."""

    number_of: ClassVar = count()

    def __init__(self, leader: Leader) -> None:
        self.leader, self.number = leader, next(self.number_of)
        weakref.finalize(self, leader.gone.append, (CLOSE, self.number))

    def commit(self, pool: KVPool, source_BP: Tensor, target_BP: Tensor) -> None:
        self.leader.tell(COMMIT, self.number, *rows_of(pool), tensors=(source_BP, target_BP))

    def clear(self, pool: KVPool, rows_R: Tensor) -> None:
        self.leader.tell(CLEAR, self.number, *rows_of(pool), tensors=(rows_R,))


def rows_of(pool: KVPool) -> tuple[int, int]:
    """Which rows a pool is of the one that was opened: the first, and the first beyond."""
    first = pool.kv_2LBSHE.storage_offset() // pool.kv_2LBSHE.stride(2)
    return first, first + pool.rows


def lead(
    spec: TargetSpec, device: str | torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A target in `spec.parallel` processes, of which this one leads and the others are started, on
    the first so many GPUs or all on the CPU: its part of the model, and the tokenizer. They load
    one after another, so that host memory holds one whole model at a time.

    Errors of `load_target` and `split_over`; ValueError for too few GPUs, for weights that
    change as they are loaded, within a job of several processes, and for another number of parts
    than this process leads already.
    """
    place, parts = device_of(device), spec.parallel
    if spec.quantise or spec.adapter or spec.shrink:
        raise ValueError(
            f"parallel: got {parts} for a target that is quantised, adapted or shrunk as it is "
            "loaded, expected the checkpoint's own weights; use parallel=1"
        )
    if place.type == "cuda" and (torch.cuda.device_count() < parts or place.index):
        got = f"{parts} from {place} on, of {torch.cuda.device_count()} GPUs here"
        raise ValueError(f"parallel: got {got}, expected device=cuda and as many, or fewer parts")
    if dist.is_initialized() and parts != 1 + len(_started):
        led = f"{1 + len(_started)} here" if _started else "of a job of several processes"
        raise ValueError(f"parallel: got {parts}, expected the number {led}, whose process this is")
    place = torch.device("cuda:0" if place.type == "cuda" else "cpu")
    model, tokenizer = part_of(spec, place, 0)
    if not _started:
        begin(parts, place)
    leader = Leader(model)
    leader.tell(LOAD)
    dist.broadcast_object_list([spec], 0, device=torch.device("cpu"))
    for _ in range(1, parts):
        all_there()
    model.base_model.register_forward_pre_hook(leader.before, with_kwargs=True)
    model.leader = leader  # type: ignore[assignment]
    return model, tokenizer


def part_of(
    spec: TargetSpec, device: torch.device, rank: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model, tokenizer = load_target(replace(spec, parallel=1), "cpu")
    remember_body(model)
    split_over(model, rank, spec.parallel)
    return model.to(device), tokenizer  # type: ignore[arg-type]


def begin(parts: int, device: torch.device) -> None:
    """Start the followers; they end with this process."""
    store = dist.TCPStore(HERE, 0, parts, True, timeout=MEETING, wait_for_workers=False)
    how = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    for rank in range(1, parts):
        words = "-m", __spec__.name, str(rank), str(parts), str(store.port), device.type
        _started.append(subprocess.Popen([sys.executable, *words], env=how))
    atexit.register(stop)
    join(store, 0, parts, device)


def join(store: dist.TCPStore, rank: int, parts: int, device: torch.device) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=parts, timeout=IDLE)
    if device.type == "cuda":  # where nothing is waited for while nothing is told
        torch.cuda.set_device(device)
        Summed.group = dist.new_group(backend="nccl", timeout=MEETING)


def all_there() -> None:
    """Wait for all processes, on the host."""
    dist.all_reduce(torch.zeros(1))


def stop() -> None:
    """The process ends, and its followers, which hold nothing of their own, with it."""
    for follower in _started:
        follower.kill()
        follower.wait()


class Follower(Runner):
    """A follower's part of a target: both its bodies, of which it is told the one."""

    lean: LeanBody | None = None

    def _use(self, lean: LeanBody) -> None:
        self.lean = lean


@torch.inference_mode()
def follow(rank: int, parts: int, port: int, device: torch.device) -> None:
    """Do as the leader does, until it ends this process, or is killed. It alone is interrupted."""
    for interrupt in (signal.SIGINT, signal.SIGTERM):
        signal.signal(interrupt, signal.SIG_IGN)
    join(dist.TCPStore(HERE, port, parts, timeout=MEETING), rank, parts, device)
    targets: dict[int, Follower] = {}
    pools: dict[int, KVPool] = {}
    while True:
        try:
            (do, number, *numbers), tensors = Order.next(device)
        except RuntimeError:  # the connection is closed
            return
        if do == LOAD:
            targets[number] = loaded(rank, parts, device)
        elif do == CLOSE:
            del pools[number]
        elif do == DROP:
            del targets[number]
            gc.collect()  # a runner is a cycle
        elif do == OPEN:
            pools[numbers[0]] = targets[number].pool(*numbers[1:3])
        elif do == TEXT:
            given = dict(zip(TEXT_INPUTS, tensors, strict=False))
            targets[number].body(**given, use_cache=False)
        else:
            touch(do, targets[number], pools[numbers[0]].part(*numbers[1:3]), numbers[3:], tensors)


def loaded(rank: int, parts: int, device: torch.device) -> Follower:
    """The part that is to be loaded, in turn."""
    told: list[Any] = [None]
    dist.broadcast_object_list(told, 0, device=torch.device("cpu"))
    for turn in range(1, parts):
        if turn == rank:
            model, tokenizer = part_of(told[0], device, rank)
            lay_side_by_side(model)
        all_there()
    return Follower(model, vocab_size(tokenizer))


def touch(
    do: int,
    part: Follower,
    pool: KVPool,
    numbers: list[int],
    tensors: tuple[Tensor | None, ...],
) -> None:
    """A pass that the leader makes, or what else it does to some rows."""
    if do != PASS:
        return (pool.commit if do == COMMIT else pool.clear)(*filter(torch.is_tensor, tensors))
    prefix, lean, backend, width = numbers[:4]
    tokens_BN, at_BN, flat_slots, lens_B, block, depth, positions_BN, packed = tensors
    assert tokens_BN is not None and at_BN is not None, "of every pass"
    attend = None
    if lens_B is not None and positions_BN is not None:
        seen = Seen(lens_B, width, None if block is None else block.bool(), depth)
        how: dict[str, Any] = {"groups": part.groups, "dtype": part.dtype}
        attend = Attend(seen, positions_BN, backend=ATTENTION[backend], **how)
        attend.packed = packed
    call = part.lean if lean else part._whole
    assert call is not None, "the leader has a lean body too"
    call(tokens_BN, at_BN, SlotCache(pool, flat_slots, prefix, attend), {})
    return None


if __name__ == "__main__":
    own, many, at = map(int, sys.argv[1:4])
    follow(own, many, at, torch.device("cpu" if sys.argv[4] == "cpu" else f"cuda:{own}"))
