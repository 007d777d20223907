"""The accelerator of a process, and the proof that the launch came out as asked.

`accelerate launch` can go wrong in silence in four ways, two of which leave independent runs that
write the same files. Each is an error here. recipes/accelerate holds configurations that work.
"""

import atexit
import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedType,
    InitProcessGroupKwargs,
)
from transformers.utils.logging import disable_progress_bar

from draftsmith.train.run.settings import Settings, check
from draftsmith.train.run.sharding import FSDP2_ASKED, check_mode, load_whole, mode


def start(settings: Settings) -> Accelerator:
    """The accelerator of this process.

    Raises:
        ValueError: a setting out of range, or a launch that came out otherwise than asked.
    """
    check(settings)
    for chatty in ("accelerate.utils.other", "DeepSpeed"):
        # One says at every save that tied weights are saved once, the other that it found a CPU.
        logging.getLogger(chatty).setLevel(logging.ERROR)
    disable_progress_bar()
    deepspeed = _flag("ACCELERATE_USE_DEEPSPEED")
    _check_environment(settings, deepspeed)
    no_device = not torch.accelerator.is_available()
    handlers: list[Any] = []
    if deepspeed:
        # torch's, of the names of its collectives that DeepSpeed calls, at every call.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if deepspeed and no_device:
        from deepspeed.ops import __compatible_ops__

        # Would be compiled on first use (50 s, needs a compiler); gloo does without.
        __compatible_ops__["deepspeed_shm_comm"] = False
        handlers.append(InitProcessGroupKwargs(backend="gloo"))
    accelerator = Accelerator(
        # DeepSpeed quietly becomes DDP under cpu=True, and finds the CPU by itself.
        cpu=no_device and not deepspeed,
        mixed_precision={"bf16": "bf16", "fp32": "no"}[settings.precision],
        gradient_accumulation_steps=settings.accumulation if deepspeed else 1,
        deepspeed_plugin=_deepspeed_plugin(settings) if deepspeed else None,
        kwargs_handlers=handlers,
    )
    atexit.register(_leave_group)
    _check_launch(accelerator, settings, deepspeed)
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


def _deepspeed_plugin(settings: Settings) -> DeepSpeedPlugin:
    """DeepSpeed accumulates, clips and steps by its own configuration: give it the recipe's."""
    check_deepspeed(settings)
    plugin = DeepSpeedPlugin()
    # Else transformers would load the frozen target in parts, too.
    plugin.zero3_init_flag = False
    plugin.deepspeed_config.update(
        gradient_accumulation_steps=settings.accumulation,
        gradient_clipping=settings.clip_norm,
        train_micro_batch_size_per_gpu=settings.batch_size,
    )
    return plugin


def check_deepspeed(settings: Settings) -> None:
    """ValueError for a value of DeepSpeed's own configuration that isn't the recipe's."""
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    given: dict[str, Any] = json.loads(Path(path).read_text()) if path != "none" else {}
    for name in ("gradient_accumulation_steps", "gradient_clipping"):
        given.setdefault(name, _number(os.environ.get(f"ACCELERATE_{name.upper()}")))
    half = settings.precision == "bf16"
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")  # "no" is what it says by itself
    asked = [
        (name, given.get(name), ours, getattr(settings, ours))
        for name, ours in (
            ("gradient_accumulation_steps", "accumulation"),
            ("gradient_clipping", "clip_norm"),
            ("train_micro_batch_size_per_gpu", "batch_size"),
        )
    ]
    asked += [
        ("bf16.enabled", given.get("bf16", {}).get("enabled"), "precision", half),
        ("fp16.enabled", given.get("fp16", {}).get("enabled"), "precision", False),
        ("mixed_precision", launched if launched != "no" else None, "precision", "bf16" * half),
    ]
    for name, theirs, field, ours in asked:
        if theirs not in (None, "auto", ours):
            raise ValueError(
                f"the DeepSpeed configuration says {name}={theirs}, the recipe says "
                f"{field}={getattr(settings, field)}: leave it out there, and the recipe holds"
            )


def _number(text: str | None) -> float | None:
    return None if text in (None, "None", "none", "auto") else float(text or 0)


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")


def _check_environment(settings: Settings, deepspeed: bool) -> None:
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


def _check_launch(accelerator: Accelerator, settings: Settings, deepspeed: bool) -> None:
    got, launched = accelerator.num_processes, int(os.environ.get("WORLD_SIZE", "1"))
    for expected, source in (
        (launched, "the launcher started"),
        (settings.processes, "processes="),
    ):
        if expected and got != expected:
            raise ValueError(
                f"this run has {got} processes, but {source} {expected}: check --num_processes; "
                "recipes/accelerate holds configurations that work"
            )
    if deepspeed != (accelerator.distributed_type == DistributedType.DEEPSPEED):
        kind = accelerator.distributed_type
        raise ValueError(f"DeepSpeed was asked for, but the launch came out as {kind}")
