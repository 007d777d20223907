"""The settings that all training recipes share."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import LoggerType

from draftsmith.command import check_least, check_one_of
from draftsmith.models.target import native_bf16


@dataclass(kw_only=True)
class Settings:
    """What every training recipe can say, without a group before it. An entry's dataclass inherits
    from this one alone, and adds its own fields and groups. ValueError for a value out of range.
    """

    out: str  # the run folder
    steps: int
    seconds: float = 0.0  # of training, over which the schedules of `steps` stretch; 0: none
    seed: int = 0
    batch_size: int = 8  # sequences in a micro-batch of one process
    accumulation: int = 1
    optimizer: str = "adamw"  # adamw | sgd | muon
    lr: float = 1e-3
    schedule: str = "cosine"  # cosine | linear | constant
    warmup: int = 0  # steps
    lr_floor: float = 0.0  # share of lr that is left at the end
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95  # of sgd and muon
    clip_norm: float = 1.0  # 0: no clipping
    # bfloat16: autocast over float32 weights | float32 | auto: bfloat16 where it is the faster one
    dtype: str = "auto"
    gradient_checkpointing: bool = False
    compile: bool = False  # the draft's decoder layers, by torch.compile
    eval_every: int = 100
    best_metric: str = "loss"  # of those that the evaluation gives
    best_mode: str = "min"  # min | max
    patience: int = 0  # evaluations without a better value before the run ends; 0: never
    save_every: int = 100
    processes: int = 0  # how many the launch must have; 0: as launched
    allow_resize: bool = False  # resume on other batches or processes where that isn't exact
    save_dtype: str = "bfloat16"  # of the result: bfloat16 | float32
    plan: bool = True  # refuse what can't fit, before weights are loaded
    track: str = "none"  # none | wandb | tensorboard | mlflow, or another of accelerate's
    show: str = "changes"  # printed at the start: changes (what isn't as by default) | all

    def __post_init__(self) -> None:
        check_least(self, **LEAST)
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"got {name}={getattr(self, name)}, expected a share in [0, 1)")
        for name, choices in CHOICES.items():
            check_one_of(name, getattr(self, name), choices)
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr: got {self.lr}, expected more than 0, and finite")
        self.automatic = self.dtype == "auto"
        if self.automatic:
            kind = "cuda" if torch.cuda.is_available() else "cpu"
            self.dtype = "bfloat16" if native_bf16(kind) else "float32"


def setting(config: object, key: str) -> Any:
    """The value of a key such as `text.max_length`; None where this entry has no such key."""
    for name in key.split("."):
        config = getattr(config, name, None)
    return config


LEAST = dict.fromkeys(("steps", "batch_size", "accumulation"), 1)
LEAST |= dict.fromkeys(("seed", "seconds", "warmup", "lr_floor", "weight_decay", "clip_norm"), 0)
LEAST |= dict.fromkeys(("eval_every", "patience", "save_every", "processes"), 0)
CHOICES = {
    "optimizer": ("adamw", "sgd", "muon"),
    "schedule": ("cosine", "linear", "constant"),
    "dtype": ("bfloat16", "float32", "auto"),
    "best_mode": ("min", "max"),
    "save_dtype": ("bfloat16", "float32"),
    "track": ("none", *(str(one) for one in LoggerType if one != LoggerType.ALL)),
    "show": ("changes", "all"),
}
