"""Before a run loads its weights: whether what it needs fits where it is to run.

On a GPU the whole plan of the run is made (train/plan/table.py) and compared with what is free. A
CPU's memory can be swapped, and its runs are mostly small: there only what lasts (weights, states
of the optimizer, the target) is added up, for targets whose files aren't small beside the memory.
"""

import warnings
from pathlib import Path
from typing import Any

import torch

from draftsmith.decode.engine.memory import GIB, size
from draftsmith.decode.forward.size import available
from draftsmith.train.plan import memory
from draftsmith.train.plan.models import staged
from draftsmith.train.plan.table import SPARE, PlanRequest, made_of, outlined, remedied

UNPLANNED = (RuntimeError, AttributeError, KeyError, TypeError, AssertionError, ImportError)
SMALL_SHARE = 16  # targets on a CPU whose files, times this, fit aren't planned


def refuse(config: Any, argv: list[str], device: torch.device, way: str, world: int) -> None:
    """ValueError for a run of `world` processes that can't fit on `device`, with the flags that
    would. way: of `memory.SHARDINGS`. `plan=false` starts it anyway.
    """
    free = available(device)
    if not config.plan or config.target.shrink or free is None:
        return
    if device.type == "cpu" and _small(config.target.path, free // world):
        return
    if not any(text.startswith("recipe=") for text in argv):
        argv = [f"entry={config.entry}", *argv]
    try:
        with torch.random.fork_rng(devices=[]):
            told = _beyond(argv, device.type, free, way, world)
    except ValueError:
        return  # of what can't be loaded the entry says more
    except UNPLANNED as error:  # a family that can't run without its numbers
        warnings.warn(f"not planned before the run: {error}", stacklevel=2)
        return
    if told:
        raise ValueError(f"memory: {told}; plan=false starts it anyway")


def _small(path: str, free: int) -> bool:
    files = list(Path(path).glob("*.safetensors")) if path else []
    return bool(files) and SMALL_SHARE * sum(file.stat().st_size for file in files) < free


def _beyond(argv: list[str], kind: str, free: int, way: str, world: int) -> str:
    """What the run needs beyond `free` bytes, in words; "" if it fits."""
    if kind == "cpu":
        cast = staged(argv, kind)
        sizes = memory.sizes_of(cast)
        lasting = sizes.weights + sizes.optimizer + sizes.target + cast.spare
        if world * lasting <= free:
            return ""
        lasts = f"{size(world * lasting)} for weights and optimizer alone"
        return f"got a run that needs {lasts}, expected at most the {size(free)} that are free here"
    outline = outlined(PlanRequest(gpus=world), argv, free * (1 - SPARE), way)
    least = min(outline.choices, key=lambda choice: choice.held.total).held
    if outline.best is not None and outline.best.checkpointing == outline.choices[0].checkpointing:
        return ""
    columns = ", ".join(f"{name} {part / GIB:.2f}" for name, part in least.columns.items())
    if outline.best is not None:
        flags = "gradient_checkpointing=true would fit"
    elif found := remedied(outline, way):
        flags = f"{' '.join(found[0])} would fit"
    else:
        flags = "lower batch_size or text.max_length, or take a larger GPU"
    needs = f"{size(least.total)} ({columns}; {made_of(least)})"
    return f"got a run that needs {needs}, expected at most {size(int(outline.room))}; {flags}"
