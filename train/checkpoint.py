"""Checkpoints of a run: all of it or nothing, written by all processes together."""

import dataclasses
import json
import shutil
from dataclasses import dataclass

from accelerate import Accelerator
from safetensors import SafetensorError

from draftsmith.train.state import Run


@dataclass
class Position:
    """How far a run is; saved with each checkpoint."""

    world: int  # processes
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_step: int = 0


def save(accelerator: Accelerator, run: Run, position: Position) -> None:
    """Write weights, optimizer state and position, unless this step's checkpoint is there already.

    Raises:
        OSError: it can't be written; the checkpoint before is intact.
    """
    latest, staged = run.latest(), run.staging(position.step)
    if latest and latest.name.endswith(f"-{position.step:06d}"):
        return
    main = accelerator.is_main_process
    try:
        if main:
            staged.mkdir()
        accelerator.wait_for_everyone()
        accelerator.save_state(str(staged))
        if main:
            content = json.dumps(dataclasses.asdict(position))
            (staged / "position.json").write_text(content)
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


def load(accelerator: Accelerator, run: Run) -> Position:
    """Load the latest complete checkpoint into what `accelerator` has prepared, if there is one.

    Raises:
        ValueError: it is of a run with another number of processes.
    """
    latest = run.latest()
    if latest is None:
        return Position(world=accelerator.num_processes)
    position = Position(**json.loads((latest / "position.json").read_text()))
    if position.world != accelerator.num_processes:
        raise ValueError(
            f"{latest} is from a run of {position.world} processes, this one has "
            f"{accelerator.num_processes}: launch it as before, or start over with out=..."
        )
    accelerator.load_state(str(latest))
    accelerator.print(f"resumed after step {position.step} from {latest}")
    return position
