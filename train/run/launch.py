"""The accelerator of a process, and the proof that the launch came out as asked.

`accelerate launch` can go wrong in silence in four ways, two of which leave independent runs that
write the same files. Each is an error here. recipes/accelerate holds configurations that work.
"""

import atexit
import json
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DeepSpeedPlugin, DistributedType, InitProcessGroupKwargs
from transformers.utils.logging import disable_progress_bar

from draftsmith.train.run import recipe
from draftsmith.train.run.folder import Run
from draftsmith.train.run.settings import Settings
from draftsmith.train.run.sharding import FSDP2_ASKED, check_mode, load_whole, mode

Config = TypeVar("Config", bound=Settings)


def begin(
    schema: type[Config],
    argv: list[str],
    shrunk: Callable[[Config], Config],
    refuse: Callable[[Any, list[str], torch.device, str, int], None],
    before: Callable[[Config], None] = lambda config: None,
) -> tuple[Config, Accelerator, Run | None]:
    """The recipe of a training entry, the accelerator of this process, the run folder: None, after
    a word, where the run is finished. shrunk: makes a trial of the recipe; refuse: what can't fit
    here (train/plan/refuse.py); before: is called before any thread starts. ValueError: also what
    `recipe.load`, `check_made`, `start` and `Run` refuse.
    """
    config: Any = recipe.check_made(recipe.load(schema, argv))
    config = shrunk(config) if config.target.shrink else config
    before(config)
    accelerator = start(config)
    run = recipe.run_of(config, main=accelerator.is_main_process)
    done = run.finished()
    if done:
        accelerator.print(f"{done['result']} is finished: nothing to do")
        return config, accelerator, None
    accelerator.print(recipe.show(config, config.show))
    way = mode(accelerator).replace("replicated", "ddp")
    refuse(config, argv, accelerator.device, way, accelerator.num_processes)
    return config, accelerator, run


def start(settings: Settings) -> Accelerator:
    """The accelerator of this process. ValueError: a launch that came out otherwise than asked."""
    for chatty in ("accelerate.utils.other", "DeepSpeed"):
        # One says at every save that tied weights are saved once, the other that it found a CPU.
        logging.getLogger(chatty).setLevel(logging.ERROR)
    disable_progress_bar()
    deepspeed = _flag("ACCELERATE_USE_DEEPSPEED")
    _check_environment(settings, deepspeed)
    no_device = not torch.accelerator.is_available()
    plugin, handlers = None, []
    if deepspeed:
        check_deepspeed(settings)
        # torch's, of the names of its collectives that DeepSpeed calls, at every call.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        plugin = DeepSpeedPlugin()
        # Else transformers would load the frozen target in parts, too.
        plugin.zero3_init_flag = False
        # It accumulates, clips and steps by its own configuration: give it the recipe's.
        plugin.deepspeed_config.update(
            gradient_accumulation_steps=settings.accumulation,
            gradient_clipping=settings.clip_norm,
            train_micro_batch_size_per_gpu=settings.batch_size,
        )
    if deepspeed and no_device:
        from deepspeed.ops import __compatible_ops__

        # Would be compiled on first use (50 s, needs a compiler); gloo does without.
        __compatible_ops__["deepspeed_shm_comm"] = False
        handlers.append(InitProcessGroupKwargs(backend="gloo"))
    accelerator = Accelerator(
        # DeepSpeed quietly becomes DDP under cpu=True, and finds the CPU by itself.
        cpu=no_device and not deepspeed,
        mixed_precision="bf16" if settings.dtype == "bfloat16" else "no",
        gradient_accumulation_steps=settings.accumulation if deepspeed else 1,
        deepspeed_plugin=plugin,
        kwargs_handlers=handlers,
        log_with=None if settings.track == "none" else settings.track,
        project_dir=settings.out,
    )
    atexit.register(_leave_group)
    got, launched = accelerator.num_processes, int(os.environ.get("WORLD_SIZE", "1"))
    wanted = {"the launcher started": launched, "processes=": settings.processes}
    for source, expected in wanted.items():
        if expected and got != expected:
            raise ValueError(
                f"this run has {got} processes, but {source} {expected}: check --num_processes; "
                "recipes/accelerate holds configurations that work"
            )
    if deepspeed != (accelerator.distributed_type == DistributedType.DEEPSPEED):
        kind = accelerator.distributed_type
        raise ValueError(f"DeepSpeed was asked for, but the launch came out as {kind}")
    check_mode(mode(accelerator), settings)
    load_whole()
    if accelerator.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Else every new tensor is filled with NaN first.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(settings.seed)
    return accelerator


def _leave_group() -> None:
    """A process that ends with gloo's threads still running is aborted now and then."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def check_deepspeed(settings: Settings) -> None:
    """ValueError for a value of DeepSpeed's own configuration that isn't the recipe's."""
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    given: dict[str, Any] = json.loads(Path(path).read_text()) if path != "none" else {}
    for name in ("gradient_accumulation_steps", "gradient_clipping"):
        text = os.environ.get(f"ACCELERATE_{name.upper()}", "none").lower()
        if text not in ("none", "auto"):
            given.setdefault(name, float(text or 0))
    for kind in ("bf16", "fp16"):
        given[f"{kind}.enabled"] = given.get(kind, {}).get("enabled")
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")  # "no" is what it says by itself
    given["mixed_precision"] = None if launched == "no" else launched
    half = settings.dtype == "bfloat16"
    for name, field, ours in (
        ("gradient_accumulation_steps", "accumulation", settings.accumulation),
        ("gradient_clipping", "clip_norm", settings.clip_norm),
        ("train_micro_batch_size_per_gpu", "batch_size", settings.batch_size),
        ("bf16.enabled", "dtype", half),
        ("fp16.enabled", "dtype", False),
        ("mixed_precision", "dtype", "bf16" * half),
    ):
        if given.get(name) not in (None, "auto", ours):
            raise ValueError(
                f"the DeepSpeed configuration says {name}={given[name]}, the recipe says "
                f"{field}={getattr(settings, field)}: leave it out there, and the recipe holds"
            )


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")


def _check_environment(settings: Settings, deepspeed: bool) -> None:
    if settings.track not in ("none", *map(str, get_available_trackers())):
        raise ValueError(
            f"track: got {settings.track}, whose package isn't installed: pip install "
            f"{settings.track}"
        )
    if _flag("ACCELERATE_USE_FSDP"):
        version = os.environ.get("FSDP_VERSION", "1")
        if version != "2" or _flag("FSDP_OFFLOAD_PARAMS"):
            raise ValueError(
                f"got FSDP with fsdp_version={version}, offload_params="
                f"{os.environ.get('FSDP_OFFLOAD_PARAMS')}; expected version 2 without offloading: "
                "launch with --config_file recipes/accelerate/fsdp2.yaml"
            )
        del os.environ["ACCELERATE_USE_FSDP"]
        os.environ[FSDP2_ASKED] = "1"
    if deepspeed and _flag("ACCELERATE_USE_CPU"):
        raise ValueError("DeepSpeed under use_cpu becomes plain DDP: launch it without use_cpu")
    # With --cpu the launcher starts one process, but leaves the address it meant for several.
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    meant_several = "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ
    if launched and meant_several and settings.processes != 1:
        raise ValueError(
            "accelerate was asked for several processes but started one, as `--cpu "
            "--num_processes 2` does: launch with --config_file recipes/accelerate/cpu_ddp2.yaml, "
            "or say processes=1 if one is meant"
        )
