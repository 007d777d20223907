"""One training step, ours against speculators': arms in processes of their own, and their rows.

Shapes are a bench's own; what it shares with the others is here.
"""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.bench.rows import lower, publish
from draftsmith.bench.speed.workers import Arm, resident, settings, synchronise
from draftsmith.models.heads.head import Head
from draftsmith.models.taps import TargetStates
from draftsmith.train.text.batches import Batch

OURS, PEER = "draftsmith", "speculators, eager"
GOALS = {"MiB": 1 / 0.6, "s": 1.5}


class Words:
    """A tokenizer, as far as its size is asked."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def get_vocab(self) -> dict[str, int]:
        return {}


def layer_sizes(args: Any) -> dict[str, Any]:
    """Of the layers of a bench's target and head, in a config's words."""
    width = 128 if args.hidden >= 1024 else 64
    return {
        "vocab_size": args.vocabulary,
        "hidden_size": args.hidden,
        "intermediate_size": 7 * args.hidden // 2,
        "num_attention_heads": args.hidden // width,
        "num_key_value_heads": max(1, args.hidden // width // 4),
        "head_dim": width,
    }


class Inputs:
    """A target and a head for it, and a row of several documents with the target's states. layers:
    of the target; head: makes one; masked: whether the batch says which positions see each other.
    """

    def __init__(
        self, args: Any, layers: int, head: Callable[[], Head], *, masked: bool = False
    ) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        with torch.device(args.device):
            config = LlamaConfig(**layer_sizes(args), num_hidden_layers=layers)
            self.target = LlamaForCausalLM(config).to(dtype).requires_grad_(False)
            self.head = head().bind(self.target)
            length = args.length // args.documents
            document_T = torch.arange(args.length) // length
            mask_1T = torch.ones(1, args.length, dtype=torch.bool)
            mask_1T[:, -1] = False
            mask_1T[:, :-1] = document_T[1:] == document_T[:-1]
            attend_TT = (document_T[:, None] == document_T[None]).tril()
            self.document_1T = document_T[None]
            self.batch = Batch(
                torch.randint(args.vocabulary, (1, args.length)),
                (torch.arange(args.length) % length)[None],
                mask_1T,
                attend_TT[None, None] if masked and args.documents > 1 else None,
                (0,),
            )
            self.taps_1TU = torch.randn(1, args.length, 3 * args.hidden, dtype=dtype)
            self.last_1TG = torch.randn(1, args.length, args.hidden, dtype=dtype)


def our_loss(x: Inputs, args: Any, objective_of: Callable[..., Any]) -> Callable[[], Tensor]:
    """objective_of: takes what every objective on a target's states does."""
    seen = TargetStates(x.last_1TG, x.taps_1TU)
    given = (x.head, x.target, Words(args.vocabulary), lambda _: seen)
    objective = objective_of(*given).to(args.device)

    def loss() -> Tensor:
        output = objective(x.batch)
        return output.loss / output.tokens

    return loss


def step(loss: Callable[[], Tensor], device: str) -> float:
    """Seconds of one forward and backward, adding to the gradients."""
    synchronise(device)
    start = time.perf_counter()
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        value = loss()
    value.backward()
    synchronise(device)
    return time.perf_counter() - start


def work(loss: Callable[[], Tensor], device: str) -> None:
    """An arm's process, its inputs made: one step for each line on stdin."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far was that of the set-up
    base = resident(device, peak=False)
    print("ready", flush=True)
    for _ in sys.stdin:
        seconds = step(loss, device)
        peak = resident(device, peak=True) - base
        print(json.dumps({"seconds": seconds, "peak": peak}), flush=True)


def compare(args: Any, file: str, what: str, shape: str, documents: int) -> list[dict[str, Any]]:
    """Two rows, time and memory, on a row of so many packed documents. file: the bench, which is
    its own arm; shape: in words.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # of the arms
    arms = {
        name: Arm(file, *settings(args, worker=name, documents=documents)) for name in (OURS, PEER)
    }
    for arm in arms.values():
        assert arm.read() == "ready\n"
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for pair in range(1 + args.pairs):
        for name in list(arms)[:: 1 if pair % 2 else -1]:
            runs[name].append(arms[name].run())
    for arm in arms.values():
        arm.close()
    shape += f", {documents} document{'s' * (documents > 1)}, {args.device}"
    peaks = {name: [runs[name][-1]["peak"]] for name in arms}
    seconds = {name: [run["seconds"] for run in runs[name][1:]] for name in arms}
    rows = [
        lower(f"{what} step, time, {shape}", PEER, seconds[OURS], seconds[PEER], "s"),
        lower(f"{what} step, peak memory, {shape}", PEER, peaks[OURS], peaks[PEER], "MiB"),
    ]
    return [row | {"goal": GOALS[row["unit"]]} for row in rows]


def measure(args: Any, file: str, what: str, shape: str, loss: Callable[[str], Any]) -> None:
    """A bench: its rows for one packed document and four, or as an arm its steps. loss: of an arm;
    the rest as in `compare`. ValueError without speculators.
    """
    name = Path(file).stem
    if folder := os.environ.get("DRAFTSMITH_SPECULATORS"):
        sys.path.append(folder)
    if args.worker:
        work(loss(args.worker), args.device)
        return
    if importlib.util.find_spec("speculators") is None:
        reason = f"{what}'s step: speculators isn't importable; see bench/speed/eagle.py"
        os.makedirs(args.out, exist_ok=True)
        Path(args.out, f"{name}.txt").write_text(reason + "\n")  # gpu.py lists it as skipped
        raise ValueError(reason)
    rows = [row for count in (1, 4) for row in compare(args, file, what, shape, count)]
    publish(name, rows, Path(args.out))
    print("Both are better when lower; their ratio is theirs / ours.")
