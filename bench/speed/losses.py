"""Peak memory and time of the bounded losses against the naive form, forward and backward.

    python bench/speed/losses.py                   # fkl, jsd and ce at vocabulary 128k; two minutes
    python bench/speed/losses.py --losses all           # every loss; five minutes on two cores
    python bench/speed/losses.py --device cuda --autocast

The peers hold full logits: torch's own F.kl_div and F.cross_entropy (the leanest that people
write) where there is one, else our pure losses under autograd. They compute no alpha, ours always
does. Every arm is a process that holds its own inputs. Its memory is its highest resident size
over all runs (VmHWM; on CUDA the allocator's peak), minus its size once the inputs are there and a
tiny run has loaded the code. Time is taken in pairs, ours and the peer's in turns, the order
swapped from pair to pair, after one run of each that isn't counted.

Names: N rows, V vocabulary, H hidden size (both models').
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.bench.rows import lower, publish
from draftsmith.bench.speed.workers import MIB, Arm, resident, settings, synchronise
from draftsmith.command import parse, run_command, unknown
from draftsmith.train.losses.chunked import chunked_cross_entropy, chunked_divergence
from draftsmith.train.losses.pure import DIVERGENCES, divergence

OURS = "chunked"
PEERS = {"fkl": "F.kl_div", "ce": "F.cross_entropy"}
OTHER_PEER = "pure loss, autograd"
PAIRS = {"fkl": 3}  # the default loss; one pair for each other


@dataclass
class Comparison:
    """Which losses, and on which shapes."""

    losses: str = "fkl,jsd,ce"  # names with commas, or all
    rows: int = 0  # 0: 1024 (8192 on CUDA; quick 256)
    vocabulary: int = 131_072
    hidden: int = 0  # 0: 512 (2048 on CUDA)
    device: str = "cpu"  # cpu | cuda
    autocast: bool = False  # bf16 matrix products
    quick: bool = False  # fewer rows, one pair each
    out: str = "runs/bench"  # the folder
    worker: str = ""  # for a process of its own: the arm that it is

    def __post_init__(self) -> None:
        large = self.device == "cuda"
        self.rows = self.rows or (256 if self.quick else 8192 if large else 1024)
        self.hidden = self.hidden or (2048 if large else 512)


class Inputs:
    """Random states and heads of both models; logits of a few nats, as trained models have."""

    def __init__(self, rows: int, vocabulary: int, hidden: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        self.q_hidden_NH = normal(rows, hidden).requires_grad_()
        # In place: a temporary here would hide as much of the arm's own peak.
        self.q_head_VH = normal(vocabulary, hidden).mul_(hidden**-0.5).requires_grad_()
        self.p_hidden_NH = normal(rows, hidden)
        self.p_head_VH = normal(vocabulary, hidden).mul_(hidden**-0.5)
        self.weight_N = torch.ones(rows, device=device)
        self.tokens_N = torch.randint(vocabulary, (rows,), generator=generator, device=device)


def chunked_total(name: str, x: Inputs) -> Tensor:
    if name == "ce":
        return chunked_cross_entropy(x.q_hidden_NH, x.q_head_VH, x.tokens_N, x.weight_N)[0]
    q, p = (x.q_hidden_NH, x.q_head_VH), (x.p_hidden_NH, x.p_head_VH)
    return chunked_divergence(divergence(name, kl_weight=0.5), *q, *p, x.weight_N).total


def naive_total(name: str, x: Inputs) -> Tensor:
    q_logits_NV = F.linear(x.q_hidden_NH, x.q_head_VH).float()
    if name == "ce":
        return (F.cross_entropy(q_logits_NV, x.tokens_N, reduction="none") * x.weight_N).sum()
    with torch.no_grad():
        p_logits_NV = F.linear(x.p_hidden_NH, x.p_head_VH).float()
    if name == "fkl":
        with torch.no_grad():
            p_logits_NV = p_logits_NV.log_softmax(-1)
        q_logits_NV = q_logits_NV.log_softmax(-1)
        loss_NV = F.kl_div(q_logits_NV, p_logits_NV, log_target=True, reduction="none")
        return (loss_NV.sum(-1) * x.weight_N).sum()
    return (divergence(name, kl_weight=0.5)(p_logits_NV, q_logits_NV) * x.weight_N).sum()


def step(total: Callable[[str, Inputs], Tensor], args: Comparison, x: Inputs) -> float:
    """Seconds of one forward and backward."""
    x.q_hidden_NH.grad = x.q_head_VH.grad = None
    synchronise(args.device)
    start = time.perf_counter()
    with torch.autocast(args.device, torch.bfloat16, enabled=args.autocast):
        loss = total(args.losses, x)
    (loss / len(x.weight_N)).backward()
    synchronise(args.device)
    return time.perf_counter() - start


def work(args: Comparison) -> None:
    """An arm's process: inputs, a tiny run, then one run for each line on stdin."""
    total = chunked_total if args.worker == OURS else naive_total
    inputs = Inputs(args.rows, args.vocabulary, args.hidden, args.device)
    step(total, args, Inputs(4, 512, args.hidden, args.device))
    base = resident(args.device, peak=False)
    print("ready", flush=True)
    for _ in sys.stdin:
        seconds = step(total, args, inputs)
        peak = resident(args.device, peak=True) - base
        print(json.dumps({"seconds": seconds, "peak": peak}), flush=True)


def compare(loss: str, args: Comparison) -> list[dict[str, Any]]:
    """Two rows, memory and time, of one loss against its peer."""
    peer = PEERS.get(loss, OTHER_PEER)
    arms = {name: Arm(__file__, *settings(args, worker=name, losses=loss)) for name in (OURS, peer)}
    for arm in arms.values():
        assert arm.read() == "ready\n"
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for pair in range(1 + (1 if args.quick else PAIRS.get(loss, 1))):
        for name in list(arms)[:: 1 if pair % 2 else -1]:
            runs[name].append(arms[name].run())
    for arm in arms.values():
        arm.close()
    shape = f"{args.rows} x {args.vocabulary} x {args.hidden}"
    shape += f" {'bf16' if args.autocast else 'fp32'} {args.device}"
    peaks = {name: [runs[name][-1]["peak"]] for name in arms}
    seconds = {name: [run["seconds"] for run in runs[name][1:]] for name in arms}
    return [
        lower(f"{loss} peak memory, {shape}", peer, peaks[OURS], peaks[peer], "MiB"),
        lower(f"{loss} time, {shape}", peer, seconds[OURS], seconds[peer], "s"),
    ]


def main(argv: list[str]) -> None:
    args = parse(Comparison, argv)
    if args.worker:
        work(args)
        return
    known = [*DIVERGENCES, "ce"]
    chosen = known if args.losses == "all" else args.losses.split(",")
    for name in chosen:
        if name not in known:
            raise ValueError(unknown("loss", name, known))
    rows = [r for loss in chosen for r in compare(loss, args)]
    threads, head = torch.get_num_threads(), 4 * args.vocabulary * args.hidden / MIB
    about = (
        "MiB and s are better when lower; their ratio is peer / ours. Shapes are N x V x H. "
        f"{threads} thread(s); the head's gradient is {head:.0f} MiB of each peak."
    )
    publish("losses", rows, Path(args.out), about=about)
    print(about)


if __name__ == "__main__":
    run_command(main, Comparison)
