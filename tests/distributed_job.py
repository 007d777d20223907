"""Run by test_distributed.py under `accelerate launch`: trains the small model of test_loop.py.

distributed_job.py FOLDER '{"steps": 5, ...}'
"""

import json
import os
from pathlib import Path

import torch
from test_loop import Bigram, Sequences, settings

from draftsmith.train.data import Batch
from draftsmith.train.launch import start
from draftsmith.train.log import run_entry
from draftsmith.train.loop import fit
from draftsmith.train.state import Run


def main(argv: list[str]) -> None:
    folder, changes = Path(argv[0]), json.loads(argv[1])
    cut_at = changes.pop("cut_at", None)
    config = settings(folder, **changes)
    accelerator = start(config)
    run = Run(folder, json.dumps({"lr": config.lr}), main=accelerator.is_main_process)
    objective = Bigram()

    class Text(Sequences):
        def batch(self, step: int, *place: int, **shape: int) -> Batch:
            if step == cut_at:
                os._exit(9)
            return super().batch(step, *place, **shape)

    fit(accelerator, objective, Text(), config, run, evaluate=lambda: {"loss": 1.0})
    if accelerator.is_main_process:
        torch.save(objective.state_dict(), folder / "weights.pt")
        (folder / "kind.txt").write_text(accelerator.distributed_type.value)


if __name__ == "__main__":
    run_entry(main)
