"""What a recipe needs, before anything is loaded: memory and time by how it is spread over GPUs.

    draftsmith plan recipe=gsm8k/distill gpu=h100 gpus=8 [mfu=0.4] [key=value ...]

Reads the recipe and the config.json of its models. A step is rehearsed on tensors without storage
(train/plan/fake_step.py), and what lasts is added up (train/plan/memory.py). Time is

    FLOPs of the step / (the GPU's dense bf16 peak * mfu) + optimizer and sampling at its bandwidth

Tokens are counted as if every row were full; evaluations and communication beyond what `mfu` stands
for aren't. docs/start/plan.md compares plans with measured peaks.
"""

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from draftsmith.command import parted
from draftsmith.decode.engine.memory import GIB
from draftsmith.decode.predict.machines import MACHINES
from draftsmith.train.plan import memory
from draftsmith.train.plan.fake_step import Step
from draftsmith.train.plan.models import Staged, staged
from draftsmith.train.run.frozen_target import check_shards
from draftsmith.train.run.settings import setting
from draftsmith.train.run.sharding import check_mode

SMALL = ("heads", "eagle", "blocks", "online", "scorers")  # entries whose weights aren't cut
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


class Choice(NamedTuple):
    """One way to run a recipe; held: on each rank; seconds: of an optimizer step."""

    way: str
    checkpointing: bool
    held: memory.Held
    seconds: float
    fits: bool


class Outline(NamedTuple):
    """recipe: its arguments; room: bytes that a rank may hold; tokens: of a step of all ranks;
    choices: the simplest first; best: the simplest that fits, with checkpointing, which costs time,
    where it must be.
    """

    asked: PlanRequest
    recipe: list[str]
    room: float
    staged: Staged
    sizes: memory.ModuleSizes
    tokens: int
    choices: list[Choice]
    best: Choice | None


def main(argv: list[str]) -> None:
    """Print what the recipe needs."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file or a pipe has no width of its own
    show(plan(argv), console)


def plan(argv: list[str]) -> Outline:
    """What the recipe in `argv` needs; ValueError also for what `staged` refuses."""
    asked, recipe = parted(PlanRequest, argv)
    return outlined(asked, recipe, MACHINES[asked.gpu].gib * GIB * (1 - SPARE))


def outlined(
    asked: PlanRequest,
    recipe: list[str],
    room: float,
    only: str = "",
    known: dict[Any, Step] | None = None,
) -> Outline:
    """The plan for ranks that may hold `room` bytes; only: this one way to share out; known: steps
    that were rehearsed, which is what takes time, and here are added to.
    """
    cast = staged(recipe, "cpu" if asked.gpu == "cpu" else "cuda")
    config, sizes = cast.config, memory.sizes_of(cast)
    check_shards(config, asked.gpus)
    if config.entry == "online" and asked.gpus > 1:
        raise ValueError(f"got gpus={asked.gpus}, expected 1: a draft that learns has one learner")
    ways = []
    for way in memory.SHARDINGS[: len(memory.SHARDINGS) if asked.gpus > 1 else 1]:
        if (config.entry in SMALL and way in ("zero3", "fsdp2")) or way != (only or way):
            continue
        with contextlib.suppress(ValueError):  # a run of this kind wouldn't start
            check_mode("replicated" if way == "ddp" else way, config)
            ways.append(way)
    recomputed = [True] if config.gradient_checkpointing else [False, True]
    if cast.layered is None:
        recomputed = [False]
    cached, steps = bool(setting(config, "cache.path")), {} if known is None else known
    text = config.batch_size, config.accumulation, cast.length, cached
    for low in sorted({way.startswith("zero") for way in ways}):  # they don't come back
        for checkpointing in recomputed:
            if (low, checkpointing, *text) not in steps:
                step = memory.rehearsed(cast, checkpointing=checkpointing, low=low)
                steps[low, checkpointing, *text] = step
    choices = []
    for way in ways:
        for checkpointing in recomputed:
            step = steps[way.startswith("zero"), checkpointing, *text]
            found = memory.held(cast, sizes, step, way, world=asked.gpus)
            seconds = _seconds(cast, sizes, step, asked, way)
            choices.append(Choice(way, checkpointing, found, seconds, found.total <= room))
    best = min((c for c in choices if c.fits), key=lambda c: c.checkpointing, default=None)
    tokens = config.batch_size * config.accumulation * asked.gpus * (cast.length or 1)
    return Outline(asked, recipe, room, cast, sizes, tokens, choices, best)


def _seconds(
    cast: Staged, sizes: memory.ModuleSizes, step: Step, asked: PlanRequest, way: str
) -> float:
    config, gpu = cast.config, MACHINES[asked.gpu]
    passes = gpu.computing(config.accumulation * step.flops, asked.mfu)
    # Weights and states are read and written, gradients read.
    mine = 1 if way == "ddp" else asked.gpus
    moved = (12 * sizes.learned + 2 * sizes.optimizer) / mine
    # Each token that the draft writes reads its weights.
    if written := (setting(config, "on_policy.share") or 0) * config.accumulation:
        moved += written * config.on_policy.max_new_tokens * sizes.weights // 2
    return passes + gpu.moving(moved)


def remedied(outline: Outline, only: str = "") -> tuple[list[str], Outline] | None:
    """Flags with which a recipe fits, and its plan with them: the first of `remedies` that does."""
    known: dict[Any, Step] = {}
    for offer in remedies(outline.staged.config):
        for flags in (offer, [*offer, "heldout.batch_size=4"]):
            set_here = {flag.split("=")[0] for flag in flags}
            kept = [text for text in outline.recipe if text.split("=")[0] not in set_here]
            try:
                found = outlined(outline.asked, [*kept, *flags], outline.room, only, known)
            except ValueError:  # flags that this run doesn't take
                break
            if found.best is not None:
                return flags, found
            if found.choices[-1].held.when != memory.EVALUATION:
                break
    return None


def remedies(config: Any) -> Iterator[list[str]]:
    """What needs less memory: rows of a step one at a time, then the target in int8 or int4 and
    shorter rows; then the target in host memory while steps read its states from disk, which costs
    disk (EAGLE-3 of an 8B target 32 KB a token), and both.
    """
    rows, length = config.batch_size, setting(config, "text.max_length")
    fewer = ["batch_size=1", f"accumulation={rows * config.accumulation}"] if rows > 1 else []
    kinds = [["target.quantise=int8"], ["target.quantise=int4"]] if config.target.path else []
    path = setting(config, "cache.path")
    kept = [f"cache.path={config.out}/states"] if path == "" else []
    resting = [*kept, "cache.offload_target=true"] if path is not None else []
    lengths = [f"text.max_length={length // part}" for part in (2, 4)] if length else []
    for ways in ([[], *kinds], [[*kind, *resting] for kind in ([], *kinds)]):
        for shorter in ([], *([one] for one in lengths)):
            for way in ways:
                if flags := [*fewer, *shorter, *way]:
                    yield flags


def show(outline: Outline, console: Console) -> None:
    """Print the choices as a table, what the step of one is made of, and how to launch the best; if
    none fits, the flags with which one does, and that plan.
    """
    asked, config, best = outline.asked, outline.staged.config, outline.best
    title = f"{asked.gpus} x {asked.gpu}, {MACHINES[asked.gpu].gib:g} GiB each"
    table = Table("sharding", "checkpointing", title=title, title_justify="left")
    for name in (*outline.choices[0].held.columns, "GiB a rank", "fits", "s/step", "hours"):
        table.add_column(name, justify="right")
    for choice in outline.choices:
        table.add_row(
            choice.way if asked.gpus > 1 else "one",
            "yes" if choice.checkpointing else "no",
            *(f"{part / GIB:.2f}" for part in (*choice.held.columns.values(), choice.held.total)),
            "[green]yes[/green]" if choice.fits else "[red]no[/red]",
            f"{choice.seconds:.3g}",
            f"{choice.seconds * config.steps / 3600:.3g}",
            style="bold" if choice is best else "",
        )
    console.print(table)
    console.print(made_of((best or outline.choices[-1]).held))
    tokens = f"{outline.tokens:,} tokens a step, {outline.tokens * config.steps:,} in all"
    console.print(f"{outline.sizes.learned:,} trained weights; at most {tokens}")
    if best is None:
        remedy = "lower batch_size or text.max_length, or take more or larger GPUs"
        if asked.gpus > 1 and not getattr(config, "shard_target", True):
            remedy += ", or share the target's layers out (shard_target=true)"
        if found := remedied(outline):
            console.print(f"nothing fits as it is; this does: {' '.join(found[0])}", soft_wrap=True)
            show(found[1], console)
        else:
            console.print(f"nothing fits: {remedy}")
        return
    speed, hours = outline.tokens / best.seconds, best.seconds * config.steps / 3600
    told = f"{hours * asked.gpus:.3g} {'' if asked.gpu == 'cpu' else 'GPU '}hours"
    console.print(f"{speed:,.0f} tokens/s at {asked.mfu:.0%} of the peak: {told}")
    console.print(launch_line(outline, best), soft_wrap=True, highlight=False)


def made_of(held: memory.Held) -> str:
    """The column `step` in its parts, GiB."""
    parts = sorted(held.parts.items(), key=lambda part: -part[1])
    told = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts if size > GIB / 200)
    return f"step, at the fullest moment ({held.when}): {told or 'under 0.01'}"


def launch_line(outline: Outline, best: Choice) -> str:
    """The command that runs a choice."""
    many, config, recipe = outline.asked.gpus, outline.staged.config, outline.recipe
    if best.checkpointing and not config.gradient_checkpointing:
        recipe = [*recipe, "gradient_checkpointing=true"]
    if many == 1:
        return f"draftsmith train {config.entry} {shlex.join(recipe)}"
    name = "gpu_ddp" if best.way == "ddp" else best.way
    file = f"--config_file recipes/accelerate/{name}.yaml --num_processes {many} "
    return f"accelerate launch {file}train/{config.entry}.py {shlex.join(recipe)}"
