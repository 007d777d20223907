"""Run by test_distributed.py under `accelerate launch`: trains the small model of bigram.py, or
with "head" a tiny head.

distributed_job.py FOLDER '{"steps": 5, ...}'
"""

import json
import os
import sys
from pathlib import Path

import torch
from bigram import Bigram, Sequences, settings
from tiny_heads import fresh, llama, objective_of, text

from draftsmith.command import guarded
from draftsmith.train.run.folder import Run
from draftsmith.train.run.launch import start
from draftsmith.train.run.loop import Objective, StepBatches, fit
from draftsmith.train.text.batches import Batch


def main(argv: list[str]) -> None:
    folder, changes = Path(argv[0]), json.loads(argv[1])
    cut_at, kind = changes.pop("cut_at", None), changes.pop("head", None)
    config = settings(folder, **changes)
    accelerator = start(config)
    run = Run(folder, json.dumps({"lr": config.lr}), main=accelerator.is_main_process)

    class Text(Sequences):
        def batch(self, step: int, *place: int, **shape: int) -> Batch:
            if step == cut_at:
                os._exit(9)
            return super().batch(step, *place, **shape)

    objective: Objective = Bigram()
    batches: StepBatches = Text()
    if kind:
        target = llama()
        objective = objective_of(fresh(kind, target), target, loss="lk")
        batches = text(batch_size=config.batch_size)
    fit(accelerator, objective, batches, config, run, evaluate=lambda: {"loss": 1.0})
    seeds = accelerator.gather(torch.tensor([torch.initial_seed()])).tolist()
    assert len(set(seeds)) == accelerator.num_processes, f"seeded alike: {seeds}"
    if accelerator.is_main_process:
        torch.save(objective.state_dict(), folder / "weights.pt")
        (folder / "kind.txt").write_text(accelerator.distributed_type.value)


if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))
