"""The training loop: with launch.py and sharding.py the only code that knows accelerate.

One optimizer step takes `accumulation` micro-batches on each process. Its loss is

    sum of the loss over all trained tokens of the step / number of these tokens

however the tokens are split over micro-batches and processes. Gradients are averaged over the
processes, by DeepSpeed over micro-batches too: the loss that goes backward is scaled up by just
this count (`averaged`).

A step is a function of the weights, the optimizer state and (seed, step, process); nothing else is
carried over. So a resumed run repeats an uninterrupted one bit by bit.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, clean_state_dict_for_safetensors, gather_object
from torch import Tensor, nn

from draftsmith.train.run.checkpoint import load, save
from draftsmith.train.run.folder import Run
from draftsmith.train.run.interrupt import GO_ON, stop_request
from draftsmith.train.run.log import Log, summary_table, wandb_tracker
from draftsmith.train.run.optim import learning_rate
from draftsmith.train.run.settings import Settings
from draftsmith.train.run.sharding import spread, whole_state

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


class MicroBatch(Protocol):
    """What an objective reads: `text.batches.Batch`, or rows of another kind."""

    @property
    def rows(self) -> tuple[int, ...]:
        """The examples in it, for messages."""

    def to(self, device: torch.device) -> Any:
        """The same on a device."""


class StepBatches(Protocol):
    """Where micro-batches come from: a function of its arguments alone, or asked for in order and
    then `checkpoint.Resumable`. One that draws or reads by process and micro-batch names in
    `chooses` what, as objectives do.
    """

    def batch(
        self, step: int, micro: int, rank: int, *, accumulation: int, world: int
    ) -> MicroBatch:
        """Micro-batch `micro` of process `rank` in optimizer step `step` (from 0), on the CPU."""


@runtime_checkable
class Patient(Protocol):
    """A source that may have to wait for what a batch is made of. to_go_on: what a user does after
    a stop.
    """

    to_go_on: str

    def heed(self, stop: list[int]) -> None:
        """Wait no longer once there is something in `stop`; what is given then isn't trained."""


class Result(NamedTuple):
    """How a run ended; `best` is None without evaluation."""

    steps: int
    best: float | None
    best_step: int


def step_seed(*parts: int) -> int:
    """A 63-bit seed that is a function of its parts alone, such as (seed, step, rank)."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def fit(
    accelerator: Accelerator,
    objective: Objective,
    batches: StepBatches,
    settings: Settings,
    run: Run,
    evaluate: Evaluate | None = None,
) -> Result:
    """Train `objective` to the end, from the latest checkpoint of `run` if there is one.

    Args:
        objective: on any device; its trainable parameters in fp32.
        evaluate: called on all processes at the start, every `eval_every` steps and at the end,
            with the objective in eval mode and without gradients. `run` keeps the best weights.

    Raises:
        ValueError: a loss or gradient that isn't finite (the state before it is saved), a step
            without trained tokens, or a checkpoint that this launch can't go on from exactly.
        OSError: a checkpoint can't be written; the one before is intact.
        SystemExit: 130, after Ctrl-C or SIGTERM; the last step is finished and saved.
    """
    fitting = _Fitting(accelerator, objective, batches, settings, run)
    at = fitting.position
    with stop_request() as stop, fitting.open_log() as log:
        if isinstance(batches, Patient):
            batches.heed(stop)
        if evaluate and at.best is None:
            log.write({"step": 0, **fitting.evaluate(evaluate)})
        while at.step < settings.steps and not fitting.out_of_patience():
            started = time.monotonic()
            micros, tokens = fitting.fetch(stop)
            record = fitting.train_step(micros, tokens)
            record["seconds"] = time.monotonic() - started
            at.seconds += record["seconds"]
            due = settings.eval_every and at.step % settings.eval_every == 0
            if evaluate and (due or at.step == settings.steps):
                record |= fitting.evaluate(evaluate)
            log.write(record)
            if settings.save_every and at.step % settings.save_every == 0:
                fitting.save()
        fitting.save()
        fitting.spread.finish()
        log.show(summary_table(str(run.folder), fitting.figures()))
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
        self.resumed = self.run.latest() is not None
        self.position = load(self.spread, self.run, self.batches)

    def save(self) -> None:
        save(self.spread, self.run, self.position, self.batches)

    def open_log(self) -> Log:
        """The log of the main process; on the others it writes nothing."""
        main, settings = self.accelerator.is_main_process, self.settings
        tracker = None
        if settings.track == "wandb" and main:
            tracker = wandb_tracker(self.run.folder, dataclasses.asdict(settings))
        return Log(
            self.run.metrics if main else None,
            step=self.position.step if self.resumed else -1,
            steps=settings.steps,
            tracker=tracker,
        )

    def out_of_patience(self) -> bool:
        waited = self.position.step - self.position.best_step
        return 0 < self.settings.patience * self.settings.eval_every <= waited

    def fetch(self, stop: list[int]) -> tuple[list[MicroBatch], int]:
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
            how = self.batches.to_go_on if isinstance(self.batches, Patient) else GO_ON
            accelerator.print(f"stopped after step {step}: {how}")
            raise SystemExit(130)
        if tokens == 0:
            rows = [row for micro in micros for row in micro.rows]
            raise ValueError(
                f"step {step + 1} has no trained token in examples {rows}: their prompts fill "
                "max_length; raise it, or leave them out"
            )
        return micros, tokens

    def train_step(self, micros: list[MicroBatch], tokens: int) -> dict[str, Any]:
        """One optimizer step over `micros`; returns its record."""
        at, accelerator = self.position, self.accelerator
        torch.manual_seed(step_seed(self.settings.seed, at.step, accelerator.process_index))
        seeded = _generators(accelerator.device)
        rate = learning_rate(self.settings, at.step)
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
        norm = self._update(micros)
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

    def figures(self) -> dict[str, Any]:
        """What the closing table shows."""
        at = self.position
        figures: dict[str, Any] = {"steps": at.step, "trained tokens": f"{at.tokens:,}"}
        figures["training seconds"] = at.seconds
        figures["tokens/s"] = at.tokens / at.seconds if at.seconds else 0.0
        if at.best is not None:
            figures[f"best held-out {self.settings.best_metric}"] = at.best
            figures["at step"] = at.best_step
        return figures

    def _means(
        self, outputs: list[StepOutput], micros: list[MicroBatch], tokens: int
    ) -> dict[str, float]:
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

    def _update(self, micros: list[MicroBatch]) -> float:
        """Clip and step; returns the gradient's norm before clipping."""
        norm = self.spread.clip()
        if not math.isfinite(norm):
            what = f"the gradient's norm is {norm}"
            self._end_at_nonfinite(what, micros, weights_good=not self.spread.stepped_in_backward)
        self.spread.step()
        return norm

    def _end_at_nonfinite(self, what: str, micros: list[MicroBatch], *, weights_good: bool) -> None:
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
