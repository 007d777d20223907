"""The accelerator of a process, and the proof that the launch came out as asked.

`accelerate launch` can go wrong in silence in four ways, two of which leave independent runs that
write the same files. Each is an error here. recipes/accelerate holds configurations that work.
"""

import logging
import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedType,
    InitProcessGroupKwargs,
)
from transformers.utils.logging import disable_progress_bar

from draftsmith.train.settings import Settings, check


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
    _check_launch(accelerator, settings, deepspeed)
    if accelerator.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Else every new tensor is filled with NaN first.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(settings.seed)
    return accelerator


def _deepspeed_plugin(settings: Settings) -> DeepSpeedPlugin:
    """DeepSpeed accumulates, clips and steps by its own configuration: give it the recipe's."""
    plugin = DeepSpeedPlugin()
    if plugin.zero_stage == 3:
        raise ValueError(
            "got ZeRO stage 3, expected 1 or 2: a sharded output head couldn't be read apart from "
            "its model, which the losses do; use --zero_stage 2"
        )
    plugin.deepspeed_config.update(
        gradient_accumulation_steps=settings.accumulation,
        gradient_clipping=settings.clip_norm,
        train_micro_batch_size_per_gpu=settings.batch_size,
    )
    return plugin


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")


def _check_environment(settings: Settings, deepspeed: bool) -> None:
    if _flag("ACCELERATE_USE_FSDP"):
        raise ValueError("got FSDP, which isn't supported: use DDP, or ZeRO through DeepSpeed")
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
