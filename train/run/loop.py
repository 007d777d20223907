"""The training loop: with launch.py and sharding.py the only code that knows accelerate.

One optimizer step takes `accumulation` micro-batches on each process. Its loss is

    sum of the loss over all trained tokens of the step / number of these tokens

however the tokens are split over micro-batches and processes. Gradients are averaged over the
processes, by DeepSpeed over micro-batches too: the loss that goes backward is scaled up by just
this count (`averaged`).

A step is a function of the weights, the optimizer state and (seed, step, process); nothing else is
carried over. So a resumed run repeats an uninterrupted one bit by bit, unless it ends by the clock
(`seconds`).
"""

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, clean_state_dict_for_safetensors, gather_object
from rich.table import Table
from torch import Tensor, nn

from draftsmith.train.run.checkpoint import load, save
from draftsmith.train.run.folder import Run
from draftsmith.train.run.log import Log, close_tracker, open_tracker
from draftsmith.train.run.optim import learning_rate
from draftsmith.train.run.settings import Settings
from draftsmith.train.run.sharding import spread, whole_state

AGAIN_SECONDS = 2.0
GO_ON = "repeat the same command to resume"  # what a user does after a stop
Evaluate = Callable[[], dict[str, float]]


class StepOutput(NamedTuple):
    """What an objective gives for one micro-batch: sums over its trained tokens, not means."""

    loss: Tensor  # [] fp32
    tokens: Tensor  # [] the number of trained tokens
    metrics: dict[str, Tensor]  # [] each


class Objective(nn.Module):
    """The draft and its loss in one module: `forward(batch) -> StepOutput`."""

    @property
    def lr_scales(self) -> dict[str, float]:
        """Factors of the learning rate, by the name of the submodule they are for."""
        return {}

    @property
    def chooses(self) -> str:
        """What it selects within a micro-batch, so that a step depends on how it is divided; draws
        from torch's generator needn't be told: `fit` sees them.
        """
        return ""

    def tokens(self, batch: Any) -> int:
        """How many tokens of a micro-batch count: its share of what the step's loss is divided by,
        and what `forward` gives as `StepOutput.tokens`.
        """
        return int(batch.loss_mask.sum())

    def observe(self, means: dict[str, float]) -> None:
        """Called with the means of each finished step; what it keeps must be a buffer."""


class Counting(Objective):
    """One that goes by how far its run is."""

    steps_done: Tensor  # of the optimizer

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps_done", torch.zeros((), dtype=torch.int64))

    def observe(self, means: dict[str, float]) -> None:
        super().observe(means)
        self.steps_done += 1


class StepBatches(Protocol):
    """Where micro-batches come from: a function of its arguments alone, or asked for in order.

    What it also may have: `chooses`, as objectives do, where it draws or reads by process and
    micro-batch; `state(step)`, its place before a step as JSON can hold it, and `restore(state)`,
    which refuses another process's; and where it may have to wait for what a batch is made of,
    `heed(stop)`, to wait no longer once something is in `stop` (what is given then isn't trained),
    and `to_go_on`, what a user does after a stop; `amount(steps, size)`, in words what there is and
    how far so many steps of so many sequences go through it.
    """

    def batch(self, step: int, micro: int, rank: int, *, accumulation: int, world: int) -> Any:
        """Micro-batch `micro` of process `rank` in optimizer step `step` (from 0), on the CPU: with
        `rows`, the examples in it by number, and `to(device)`.
        """


class Result(NamedTuple):
    """How a run ended; `best` is None without evaluation."""

    steps: int
    best: float | None
    best_step: int


def step_seed(*parts: int) -> int:
    """A 63-bit seed that is a function of its parts alone, such as (seed, step, rank)."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


@contextlib.contextmanager
def stop_request() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM as a request to finish the step, save, and go: a list that gets the
    signals as they come; a second Ctrl-C interrupts at once.
    """
    received: list[int] = []
    first = 0.0

    def note(number: int, _: object) -> None:
        nonlocal first
        # A launcher repeats what the terminal has sent to all: that isn't a second wish.
        now = time.monotonic()
        if received and number == signal.SIGINT and now - first > AGAIN_SECONDS:
            raise KeyboardInterrupt
        first = first or now
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fit(
    accelerator: Accelerator,
    objective: Objective,
    batches: StepBatches,
    settings: Settings,
    run: Run,
    evaluate: Evaluate | None = None,
) -> Result:
    """Train `objective` (on any device, trainable parameters in fp32) to the end, from the latest
    checkpoint of `run` if there is one. evaluate: called on all processes at the start, every
    `eval_every` steps and at the end, in eval mode without gradients; `run` keeps the best weights.

    ValueError: a loss or gradient that isn't finite (the state before it is saved), a step without
    trained tokens, or a checkpoint that this launch can't go on from exactly. OSError: a checkpoint
    can't be written; the one before is intact. SystemExit 130: Ctrl-C or SIGTERM; the last step is
    finished and saved.
    """
    resumed = run.latest() is not None
    fitting = _Fitting(accelerator, objective, batches, settings, run)
    at, main = fitting.position, accelerator.is_main_process
    metrics, done = run.metrics if main else None, at.step if resumed else -1
    open_tracker(accelerator, run.folder, settings, done)
    if not settings.seconds and (amount := getattr(batches, "amount", None)):
        size = settings.batch_size * settings.accumulation * accelerator.num_processes
        accelerator.print(amount(settings.steps, size))
    lap = settings.eval_every if getattr(batches, "endless", False) else 0
    shown: Any = {"lap": lap, "limit": max(0.0, settings.seconds - at.seconds)}
    with (
        stop_request() as stop,
        Log(metrics, step=done, steps=settings.steps, tracker=accelerator.log, **shown) as log,
    ):
        if heed := getattr(batches, "heed", None):
            heed(stop)
        if evaluate and at.best is None:
            log.write({"step": 0, **fitting.evaluate(evaluate)})
        patience = settings.patience * settings.eval_every or math.inf
        while fitting.reached < settings.steps and at.step - at.best_step < patience:
            started = time.monotonic()
            record = fitting.train_step(*fitting.fetch(stop))
            record["seconds"] = time.monotonic() - started
            fitting.clock(record)
            due = settings.eval_every and at.step % settings.eval_every == 0
            if evaluate and (due or fitting.reached >= settings.steps):
                record |= fitting.evaluate(evaluate)
            log.write(record)
            if settings.save_every and at.step % settings.save_every == 0:
                fitting.save()
        fitting.save()
        fitting.spread.finish()
        log.console.print(fitting.summary())
    close_tracker(accelerator)
    return Result(at.step, at.best, at.best_step)


@dataclasses.dataclass
class _Fitting:
    """One `fit`: what accelerate has wrapped, and how far it is."""

    accelerator: Accelerator
    objective: Objective
    batches: StepBatches
    settings: Settings
    run: Run

    def __post_init__(self) -> None:
        self.spread = spread(self.accelerator, self.objective, self.settings)
        self.position = load(self.spread, self.run, self.batches)

    @property
    def reached(self) -> float:
        """The step by which schedules go: of a run of so many seconds, their share of `steps`."""
        at, settings = self.position, self.settings
        return settings.steps * at.seconds / settings.seconds if settings.seconds else at.step

    def clock(self, record: dict[str, Any]) -> None:
        """Count a step's seconds; where they decide, by the clock of one process."""
        if self.settings.seconds:
            [record["seconds"]] = broadcast_object_list([record["seconds"]])
        self.position.seconds += record["seconds"]
        if self.settings.seconds and isinstance(self.objective, Counting):
            self.objective.steps_done.fill_(int(self.reached))

    def save(self) -> None:
        save(self.spread, self.run, self.position, self.batches)

    def fetch(self, stop: list[int]) -> tuple[list[Any], int]:
        """This process's micro-batches of the next step, and the whole step's trained tokens. One
        all-reduce counts them, and tells every process whether one of them was asked to stop.
        """
        accelerator, step, many = self.accelerator, self.position.step, self.settings.accumulation
        place = {"accumulation": many, "world": accelerator.num_processes}
        rank = accelerator.process_index
        micros = [self.batches.batch(step, micro, rank, **place) for micro in range(many)]
        counts = [sum(map(self.objective.tokens, micros)), len(stop)]
        total = accelerator.reduce(torch.tensor(counts, device=accelerator.device))
        tokens, stopping = total.tolist()
        if stopping:
            self.save()
            how = getattr(self.batches, "to_go_on", GO_ON)
            accelerator.print(f"stopped after step {step}: {how}")
            raise SystemExit(130)
        if tokens == 0:
            rows = [row for micro in micros for row in micro.rows]
            raise ValueError(
                f"step {step + 1} has no trained token in examples {rows}: their prompts fill "
                "max_length; raise it, or leave them out"
            )
        return micros, tokens

    def train_step(self, micros: list[Any], tokens: int) -> dict[str, Any]:
        """One optimizer step over `micros`; returns its record."""
        at, accelerator = self.position, self.accelerator
        torch.manual_seed(step_seed(self.settings.seed, at.step, accelerator.process_index))
        seeded = _generators(accelerator.device)
        rate = learning_rate(self.settings, self.reached)
        for optimizer in self.spread.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("lr_scale", 1.0)
        self.objective.train()
        scale = self.spread.averaged / tokens
        outputs: list[StepOutput] = []
        means: dict[str, float] = {}
        for micro in micros:
            last = len(outputs) + 1 == len(micros)
            with self.spread.micro(last=last):
                outputs.append(self.spread(micro.to(accelerator.device)))
                if last:
                    # Before the last backward: DeepSpeed makes its step inside of it.
                    means = self._means(outputs, micros, tokens)
                self.spread.backward(outputs[-1].loss * scale, last=last)
        norm = self.spread.clip()
        if not math.isfinite(norm):
            good = not self.spread.stepped_in_backward
            self._end_at_nonfinite(f"the gradient's norm is {norm}", micros, weights_good=good)
        self.spread.step()
        at.draws |= not torch.equal(seeded, _generators(accelerator.device))
        at.step += 1
        at.tokens += tokens
        self.objective.observe(means)
        return {"step": at.step, **means, "grad_norm": norm, "lr": rate, "tokens": tokens}

    def evaluate(self, evaluate: Evaluate) -> dict[str, float]:
        """Evaluate, keep the weights if they are the best so far, and return `eval_...` values."""
        at, wanted = self.position, self.settings.best_metric
        self.objective.eval()
        with torch.no_grad():
            # One process decides for all: a sum in another order may differ in its last bit.
            [values] = broadcast_object_list([evaluate()])
        if not math.isfinite(values.get(wanted, math.nan)):
            raise ValueError(
                f"the evaluation after step {at.step} gave {values}, expected a finite {wanted} "
                "in it (best_metric)"
            )
        sign = 1 if self.settings.best_mode == "max" else -1
        if at.best is None or sign * values[wanted] > sign * at.best:
            at.best, at.best_step = values[wanted], at.step
            weights = whole_state(self.objective)
            if self.accelerator.is_main_process:
                self.run.save_best(clean_state_dict_for_safetensors(weights), at.step)
        return {f"eval_{name}": value for name, value in values.items()}

    def summary(self) -> Table:
        at, table = self.position, Table(title=str(self.run.folder), show_header=False)
        table.add_row("steps", f"{at.step}")
        table.add_row("trained tokens", f"{at.tokens:,}")
        table.add_row("training seconds", f"{at.seconds:,.4g}")
        table.add_row("tokens/s", f"{at.tokens / at.seconds if at.seconds else 0.0:,.4g}")
        if at.best is not None:
            table.add_row(f"best held-out {self.settings.best_metric}", f"{at.best:,.4g}")
            table.add_row("at step", f"{at.best_step}")
        return table

    def _means(self, outputs: list[StepOutput], micros: list[Any], tokens: int) -> dict[str, float]:
        """Means per trained token over the whole step; ends the run if the loss isn't finite."""
        names = sorted(outputs[0].metrics)
        sums_by_micro = [
            torch.stack([out.loss.detach(), out.tokens, *(out.metrics[n] for n in names)]).double()
            for out in outputs
        ]
        loss, counted, *sums = self.accelerator.reduce(sum(sums_by_micro)).tolist()
        assert counted == tokens, f"the objective counted {counted} tokens, the masks {tokens}"
        if not math.isfinite(loss):
            pairs = zip(micros, outputs, strict=True)
            bad = [micro for micro, output in pairs if not math.isfinite(output.loss.item())]
            self._end_at_nonfinite(f"the loss is {loss}", bad, weights_good=True)
        return {"loss": loss / tokens} | {n: s / tokens for n, s in zip(names, sums, strict=True)}

    def _end_at_nonfinite(self, what: str, micros: list[Any], *, weights_good: bool) -> None:
        """Keep the last good state, and say which examples the bad step had."""
        if weights_good:
            self.save()
        rows = sorted(gather_object([row for micro in micros for row in micro.rows]))
        raise ValueError(
            f"step {self.position.step + 1}: {what}; the examples of the batch are {rows}. The "
            f"state before it is kept in {self.run.latest()}. Look at these examples, or start "
            "another run with a lower lr"
        )


def _generators(device: torch.device) -> Tensor:
    """The state of torch's generators, which any draw changes."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return torch.cat(states)
