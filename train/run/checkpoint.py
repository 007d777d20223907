"""Checkpoints of a run: all of it or nothing, written by all processes together."""

import dataclasses
import json
import math
import shutil
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError

from draftsmith.train.run.folder import Run
from draftsmith.train.run.sharding import Replicated, mode


@dataclass
class Position:
    """How far a run is, and how it was spread; saved with each checkpoint."""

    world: int  # processes
    mode: str = "replicated"  # see sharding.mode
    batch_size: int = 0
    accumulation: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_step: int = 0
    draws: bool = True  # whether its steps drew from torch's generator, as dropout and noise do

    @property
    def division(self) -> tuple[int, int, int]:
        """The sequences of a step: a micro-batch's, times accumulation, times processes."""
        return self.batch_size, self.accumulation, self.world


def save(spread: Replicated, run: Run, position: Position, batches: Any) -> None:
    """Write weights, optimizer state and position, unless this step's checkpoint is there already;
    and each process's place in `batches`, where they have a `state`. OSError: it can't be written;
    the checkpoint before is intact.
    """
    latest, staged, accelerator = run.latest(), run.staging(position.step), spread.accelerator
    if latest and latest.name.endswith(f"-{position.step:06d}"):
        return
    main = accelerator.is_main_process
    try:
        if main:
            staged.mkdir()
        accelerator.wait_for_everyone()
        spread.save(staged)
        if hasattr(batches, "state"):
            state = json.dumps(batches.state(position.step))
            (staged / BATCHES.format(accelerator.process_index)).write_text(state)
        if main:
            (staged / "position.json").write_text(json.dumps(dataclasses.asdict(position)))
        accelerator.wait_for_everyone()
        if main:
            run.commit(position.step)
        accelerator.wait_for_everyone()
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch reports a full disk as RuntimeError, safetensors as an error of its own.
        shutil.rmtree(staged, ignore_errors=True)
        kept = f"{latest} is intact" if latest else "there is no earlier one"
        raise OSError(
            f"can't save the checkpoint of step {position.step}: {error}; {kept}. "
            "Mend the cause (a full disk?), then repeat the same command to resume"
        ) from error


def load(spread: Replicated, run: Run, batches: Any) -> Position:
    """Load the latest complete checkpoint into what is spread and `batches`, if there is one. A
    step is a function of its sequences, so a run may go on with these divided otherwise, on more or
    fewer processes. Where that isn't the same run, the recipe's `allow_resize` asks for it.
    ValueError: a checkpoint of another mode, or of another division that can't be exact.
    """
    accelerator, settings = spread.accelerator, spread.settings
    division = settings.batch_size, settings.accumulation
    now = Position(accelerator.num_processes, mode(accelerator), *division, draws=False)
    latest = run.latest()
    if latest is None:
        return now
    then = Position(**json.loads((latest / "position.json").read_text()))
    if then.mode != now.mode:
        raise ValueError(
            f"{latest} is of a {then.mode} run, this launch is {now.mode}: launch it as before, or "
            "start over with out=..."
        )
    how = ""
    if then.division != now.division:
        # What draws or reads by process and micro-batch, or selects within a micro-batch.
        drawn = "random draws (dropout, noise)" if then.draws else ""
        chosen = [getattr(part, "chooses", "") for part in (spread.objective, batches)]
        depending = [name for name in (drawn, *chosen) if name]
        how = resized(then, now, depending, allow=settings.allow_resize)
    spread.load(latest)
    if hasattr(batches, "restore"):
        place = latest / BATCHES.format(accelerator.process_index)
        if not place.exists():
            raise ValueError(
                f"{latest} has no {place.name}, the place in the corpus of this process: launch as "
                "many processes as before"
            )
        batches.restore(json.loads(place.read_text()))
    accelerator.print(f"resumed after step {then.step} from {latest}{how}")
    then.batch_size, then.accumulation, then.world = now.division
    return then


def resized(then: Position, now: Position, depending: list[str], *, allow: bool) -> str:
    """What to say about a step that is divided in another way; ValueError where that can't be.
    depending: what makes a step depend on its division; allow: whether to go on inexactly.
    """
    before, after = (" x ".join(map(str, position.division)) for position in (then, now))
    change = f"{before} became {after} (batch_size x accumulation x processes)"
    if then.world != now.world and now.mode.startswith("zero"):
        raise ValueError(
            f"{change}: DeepSpeed's checkpoint of {then.world} processes is cut into as many parts "
            f"and loads on no other number; launch {then.world} (DDP and FSDP2 runs can change)"
        )
    if math.prod(then.division) != math.prod(now.division):
        why = "a step would have other sequences than before"
    elif depending:
        why = f"with {', '.join(depending)} a step depends on how it is divided"
    else:
        return f"; {change}: the same sequences a step, so the same run up to rounding"
    if not allow:
        raise ValueError(
            f"{change}, and {why}: the run can't go on exactly. Launch it as before, choose "
            "batch_size and accumulation so that the product stays, or say allow_resize=true"
        )
    return f"; {change}: NOT the same run, since {why}"


BATCHES = "batches-{}.json"  # of a process
