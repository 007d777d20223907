"""Run by test_sharding.py, in its process or under `accelerate launch`: distils a tiny draft, is
cut short, resumes in the same processes, and leaves records and whole weights in FOLDER/NAME.

sharding_job.py FOLDER '{NAME: {"steps": 4, ...}, ...}'
"""

import contextlib
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from test_loop import settings
from tiny_heads import TOKENS, llama
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.decode.sampling import SamplingParams
from draftsmith.train.data import Batch, Batches, Examples
from draftsmith.train.heldout import mean_output
from draftsmith.train.launch import start
from draftsmith.train.log import run_entry
from draftsmith.train.loop import fit
from draftsmith.train.objectives import Distillation, Losses
from draftsmith.train.settings import Settings
from draftsmith.train.sharding import mode
from draftsmith.train.state import Run
from draftsmith.train.teachers import StateTeacher
from draftsmith.train.text import Snapshot


class Interrupted(RuntimeError):
    """What a run is cut short with."""


class Stages(Losses):
    steps: int = 1


def tiny_draft(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
        eos_token_id=None,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def texts() -> Examples:
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 20, (40,), generator=draw).tolist()
    ids = [torch.randint(0, TOKENS, (n,), generator=draw).tolist() for n in lengths]
    return Examples.collect((row, [i > 1 for i in range(len(row))]) for row in ids)


class Cut(Batches):
    """Batches that end the run at a step."""

    at = -1

    def batch(self, step: int, micro: int, rank: int, *, accumulation: int, world: int) -> Batch:
        if step == self.at:
            raise Interrupted
        return super().batch(step, micro, rank, accumulation=accumulation, world=world)


def train(accelerator: Accelerator, config: Settings, *, tied: bool, cut_at: int) -> nn.Module:
    main = accelerator.is_main_process
    run = Run(config.out, json.dumps({"lr": config.lr}), main=main)
    target, draft = llama(), tiny_draft(tied)
    snapshot = Snapshot(draft, torch.float32)
    if config.gradient_checkpointing:
        draft.gradient_checkpointing_enable({"use_reentrant": False})
    plain = {"max_length": 32, "seed": 0, "packing": False, "pad_id": 0}
    batches = Cut(texts(), batch_size=config.batch_size, **plain)
    batches.at = cut_at
    heldout = Batches(texts(), batch_size=4, **plain)
    objective = Distillation(
        draft,
        StateTeacher(target, TOKENS),
        Stages(loss="0.5*ce+0.5*fkl"),
        vocab_size=TOKENS,
        warp=SamplingParams(1.0),
    )

    def evaluate() -> dict[str, float]:
        means = mean_output(accelerator, objective.measure, heldout, 8)
        ids = torch.arange(30).view(2, 15)
        with torch.no_grad():
            copied = snapshot.take()(ids).logits
        return means | {"copy": float(copied.std() + copied[1, 3, 5])}

    try:
        fit(accelerator, objective, batches, config, run, evaluate)
    finally:
        run.close()
    assert [type(p) for p in objective.parameters()] == [nn.Parameter] * len(
        list(draft.parameters())
    )
    assert (draft.lm_head.weight is draft.model.embed_tokens.weight) == tied
    return draft


def main(argv: list[str]) -> None:
    accelerator: Accelerator | None = None
    for name, changes in json.loads(argv[1]).items():
        folder = Path(argv[0]) / name
        cut_at, tied = changes.pop("cut_at", -1), changes.pop("tied", True)
        config = settings(folder, **changes)
        # DeepSpeed allows one in a process; the runs share all that it is made from.
        accelerator = accelerator or start(config)
        if cut_at >= 0:
            with contextlib.suppress(Interrupted):
                train(accelerator, config, tied=tied, cut_at=cut_at)
            accelerator.free_memory()
            accelerator.wait_for_everyone()
        draft = train(accelerator, config, tied=tied, cut_at=-1)
        if accelerator.is_main_process:
            torch.save(dict(draft.state_dict()), folder / "weights.pt")
            (folder / "mode.txt").write_text(mode(accelerator))
        accelerator.free_memory()


if __name__ == "__main__":
    run_entry(main)
