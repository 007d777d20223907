"""What a recipe needs, before anything is loaded: memory and time by how it is spread over GPUs.

    draftsmith plan recipe=gsm8k/distill gpu=h100 gpus=8 [mfu=0.4] [key=value ...]

Reads the recipe and the config.json of its models. A step is rehearsed on tensors without storage
(train/plan/fake_step.py), and what lasts is added up (train/plan/memory.py). Time is

    FLOPs of the step / (the GPU's dense bf16 peak * mfu) + optimizer and sampling at its bandwidth

Tokens are counted as if every row were full; evaluations and communication beyond what `mfu` stands
for aren't. docs/scale.md compares plans with measured peaks.
"""

import shlex
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from draftsmith.command import parse
from draftsmith.decode.engine.memory import GIB
from draftsmith.decode.predict.machines import MACHINES
from draftsmith.train.plan.fake_step import Step
from draftsmith.train.plan.memory import (
    SHARDINGS,
    Held,
    ModuleSizes,
    Sharding,
    held,
    rehearsed,
    sizes_of,
)
from draftsmith.train.plan.models import Staged, staged
from draftsmith.train.run.frozen_target import check_shards
from draftsmith.train.run.settings import setting
from draftsmith.train.run.sharding import check_mode

SPARE = 0.08  # of a GPU's memory: CUDA's context, kernels' workspaces, what the allocator wastes


@dataclass
class PlanRequest:
    """What the recipe is to run on; every other key is the recipe's."""

    gpu: str = "h100"  # h100 | h200 | b200 | a100-80 | a100-40 | l40s | rtx4090 | cpu
    gpus: int = 1  # how many, a process each
    mfu: float = 0.4  # the share of the peak that a step reaches

    def __post_init__(self) -> None:
        if self.gpu not in MACHINES:
            raise ValueError(f"gpu: got {self.gpu!r}, expected one of {', '.join(MACHINES)}")
        if self.gpus < 1 or not 0 < self.mfu <= 1:
            raise ValueError(
                f"got gpus={self.gpus}, mfu={self.mfu}, expected 1 or more, and a share in (0, 1]"
            )


@dataclass(frozen=True)
class Choice:
    """One way to run a recipe; held: on each rank; seconds: of an optimizer step."""

    way: Sharding
    checkpointing: bool
    held: Held
    seconds: float
    fits: bool


@dataclass(frozen=True)
class Outline:
    """choices: the simplest first; tokens: of an optimizer step, all ranks together."""

    asked: PlanRequest
    staged: Staged
    sizes: ModuleSizes
    tokens: int
    choices: list[Choice]

    @property
    def best(self) -> Choice | None:
        """The simplest choice that fits, with checkpointing, which costs time, where it must be."""
        fitting = (choice for choice in self.choices if choice.fits)
        return min(fitting, key=lambda c: c.checkpointing, default=None)


def main(argv: list[str]) -> None:
    """Print what the recipe needs."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file or a pipe has no width of its own
    show(plan(argv), [a for a in argv if a.partition("=")[0] not in OWN], console)


OWN = ("gpu", "gpus", "mfu")


def plan(argv: list[str]) -> Outline:
    """What the recipe in `argv` needs. Raises ValueError for what `staged` refuses, an unknown GPU,
    or a number out of range.
    """
    own = [argument.partition("=")[0] in OWN for argument in argv]
    asked = parse(PlanRequest, [a for a, mine in zip(argv, own, strict=True) if mine])
    device = "cpu" if asked.gpu == "cpu" else "cuda"
    cast = staged([a for a, mine in zip(argv, own, strict=True) if not mine], device)
    check_shards(cast.config, asked.gpus)
    if cast.config.entry == "online" and asked.gpus > 1:
        raise ValueError(f"got gpus={asked.gpus}, expected 1: a draft that learns has one learner")
    config, sizes = cast.config, sizes_of(cast)
    ways = [way for way in SHARDINGS[: len(SHARDINGS) if asked.gpus > 1 else 1] if _can(way, cast)]
    room = MACHINES[asked.gpu].gib * GIB * (1 - SPARE)
    choices = []
    asked_for = [True] if config.gradient_checkpointing else [False, True]
    steps: dict[tuple[bool, bool], Step] = {}
    for low in sorted({way.zero > 0 for way in ways}):  # low weights don't come back
        for checkpointing in asked_for if cast.layered is not None else [False]:
            steps[low, checkpointing] = rehearsed(cast, checkpointing=checkpointing, low=low)
    for way in ways:
        for (low, checkpointing), step in steps.items():
            if low != (way.zero > 0):
                continue
            found = held(cast, sizes, step, way, world=asked.gpus)
            seconds = _seconds(cast, sizes, step, asked, way)
            choices.append(Choice(way, checkpointing, found, seconds, found.total <= room))
    rows = config.batch_size * config.accumulation * asked.gpus
    return Outline(asked, cast, sizes, rows * (cast.length or 1), choices)


def _can(way: Sharding, cast: Staged) -> bool:
    """Whether a run of this kind would start."""
    config = cast.config
    if config.entry in ("heads", "eagle", "online", "scorers") and way.cuts_weights:
        return False
    try:
        check_mode("replicated" if way.name == "ddp" else way.name, config)
    except ValueError:
        return False
    return True


def _seconds(
    cast: Staged, sizes: ModuleSizes, step: Step, asked: PlanRequest, way: Sharding
) -> float:
    config, gpu = cast.config, MACHINES[asked.gpu]
    passes = config.accumulation * step.flops / (gpu.tflops * 1e12 * asked.mfu)
    # Weights and states are read and written, gradients read.
    mine = asked.gpus if way.zero or way.cuts_weights else 1
    updated = (12 * sizes.learned + 2 * sizes.optimizer) / mine
    # Each token that the draft writes reads its weights.
    written = (setting(config, "on_policy.share") or 0) * config.accumulation
    read = written * config.on_policy.max_new_tokens * sizes.weights // 2 if written else 0
    return passes + (updated + read) / (gpu.bandwidth * 1e9)


def show(outline: Outline, rest: list[str], console: Console) -> None:
    """Print the choices as a table, and how to launch the best one."""
    asked, config, sizes = outline.asked, outline.staged.config, outline.sizes
    gpu = MACHINES[asked.gpu]
    table = Table(title=f"{asked.gpus} x {asked.gpu}, {gpu.gib:g} GiB each", title_justify="left")
    for name in ("sharding", "checkpointing"):
        table.add_column(name)
    for name in ("weights", "optimizer", "gradients", "target", "step", "GiB a rank"):
        table.add_column(name, justify="right")
    for name in ("fits", "s/step", "hours"):
        table.add_column(name, justify="right")
    for choice in outline.choices:
        on = choice.held
        parts = (on.weights, on.optimizer, on.gradients, on.target, on.step, on.total)
        table.add_row(
            choice.way.name if asked.gpus > 1 else "one",
            "yes" if choice.checkpointing else "no",
            *(f"{part / GIB:.2f}" for part in parts),
            "[green]yes[/green]" if choice.fits else "[red]no[/red]",
            f"{choice.seconds:.3g}",
            f"{choice.seconds * config.steps / 3600:.3g}",
            style="bold" if choice is outline.best else "",
        )
    console.print(table)
    best, learned = outline.best, f"{sizes.learned:,} trained weights"
    total = outline.tokens * config.steps
    console.print(f"{learned}; at most {outline.tokens:,} tokens a step, {total:,} in all")
    if best is None:
        remedy = "lower batch_size or text.max_length, or take more or larger GPUs"
        if asked.gpus > 1 and not getattr(config, "shard_target", True):
            remedy += ", or share the target's layers out (shard_target=true)"
        console.print(f"nothing fits: {remedy}")
        return
    speed, hours = outline.tokens / best.seconds, best.seconds * config.steps / 3600
    console.print(
        f"{speed:,.0f} tokens/s at {asked.mfu:.0%} of the peak: {hours * asked.gpus:.3g} GPU hours"
    )
    console.print(launch_line(outline, best, rest), soft_wrap=True, highlight=False)


def launch_line(outline: Outline, best: Choice, rest: list[str]) -> str:
    """The command that runs a choice."""
    many, config = outline.asked.gpus, outline.staged.config
    name = "gpu_ddp" if best.way.name == "ddp" else best.way.name
    file = f"--config_file recipes/accelerate/{name}.yaml --num_processes {many} "
    if many == 1:
        file = "--config_file recipes/accelerate/cpu.yaml " if outline.asked.gpu == "cpu" else ""
    if best.checkpointing and not config.gradient_checkpointing:
        rest = [*rest, "gradient_checkpointing=true"]
    return f"accelerate launch {file}train/{config.entry}.py {shlex.join(rest)}"
