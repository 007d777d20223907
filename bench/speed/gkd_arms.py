"""The arms of gkd.py, a process each: our loop and TRL's on the same rows, gated into turns."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from draftsmith.bench.speed.workers import resident, synchronise
from draftsmith.decode.prompts.splits import load_rows
from draftsmith.models.target import TargetSpec
from draftsmith.models.tokenizer import stand_in_tokenizer
from draftsmith.train.distill import DistillConfig
from draftsmith.train.objectives.distillation import Distillation, stages
from draftsmith.train.run.folder import Run
from draftsmith.train.run.launch import start
from draftsmith.train.run.loop import StepBatches, fit
from draftsmith.train.teachers.states import Cache
from draftsmith.train.teachers.teachers import open_teacher
from draftsmith.train.text.batches import Batch, Batches
from draftsmith.train.text.on_policy import (
    OnPolicy,
    OnPolicyText,
    Snapshot,
    Text,
    make_batches,
    prompt_of,
)
from draftsmith.train.text.tokenise import tokenise

PEER, DEFAULTS = "TRL GKDTrainer", "TRL GKDTrainer, defaults"
IDENTICAL, PACKED, CACHED = "identical batches", "packed", "packed, cached states"
GSM8K = Path(__file__).resolve().parents[3] / "shared/data/gsm8k/train.jsonl"
Shape = tuple[int, ...]  # as in device.py


@dataclass(frozen=True)
class Case:
    """A pair, and what it is trained on."""

    target: Shape
    draft: Shape
    arms: tuple[str, ...] = (PEER, IDENTICAL)
    batch: int = 4
    length: int = 512
    on_policy: float = 0.0
    answer: int = 128
    steps: int = 2  # a turn
    goal: float = 1.5


@dataclass
class Bench:
    """tiny=true tries the script. The rest is for the arms' processes."""

    device: str = "cpu"
    out: str = "runs/bench"
    pairs: int = 5
    dtype: str = "bfloat16"  # | float32
    tiny: bool = False
    case: str = ""
    arm: str = ""


class Gate:
    """What an arm passes at the beginning of each step: there it waits for its turns, one for each
    line on stdin, and tells how the last one went.
    """

    def __init__(self, device: str, steps: int) -> None:
        self.device, self.steps, self.left = device, steps, -1
        self.told, sys.stdout = sys.stdout, sys.stderr  # loops chat
        self.tokens: int | Tensor = 0
        self.losses: list[float | Tensor] = []
        self.start = self.base = 0.0

    def __call__(self) -> None:
        if self.left > 0:
            self.left -= 1
            return
        synchronise(self.device)
        if self.left == 0:
            seconds = time.perf_counter() - self.start
            peak = resident(self.device, peak=True) - self.base
            told = {
                "seconds": seconds,
                "steps": self.steps,
                "tokens": int(self.tokens),
                "peak": peak,
            }
            print(json.dumps(told | {"loss": float(self.losses[0])}), file=self.told, flush=True)
        else:
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            else:
                Path("/proc/self/clear_refs").write_text("5")  # the peak so far was the set-up's
            self.base = resident(self.device, peak=False)
            print("ready", file=self.told, flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # neither loop is to save what it trained
        self.left, self.tokens, self.start = self.steps - 1, 0, time.perf_counter()


class Gated:
    """Batches that begin at the gate."""

    def __init__(self, batches: StepBatches, gate: Gate) -> None:
        self.batches, self.gate = batches, gate

    def batch(self, step: int, micro: int, rank: int, *, accumulation: int, world: int) -> Batch:
        self.gate()
        made = self.batches.batch(step, micro, rank, accumulation=accumulation, world=world)
        self.gate.tokens += int(made.loss_mask.sum())
        return made


def random_lm(shape: Shape, device: str, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    layers, hidden, intermediate, heads, kv_heads, vocab = shape
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


class Inputs:
    """The pair, a tokenizer of its vocabulary's size, rows of GSM8K or of the standard library."""

    def __init__(self, case: Case, settings: Bench, folder: str) -> None:
        self.tokenizer = stand_in_tokenizer()
        missing = case.target[-1] - len(self.tokenizer)
        self.tokenizer.add_tokens([f"<|{i}|>" for i in range(missing)])
        rows = load_rows(str(GSM8K) if GSM8K.exists() else "stdlib", "train")[:100]
        self.config = DistillConfig(
            out=folder,
            target=TargetSpec("random"),
            steps=10**6,
            batch_size=case.batch,
            lr=1e-4,
            schedule="constant",
            weight_decay=0.0,
            beta2=0.999,
            dtype=settings.dtype,
            eval_every=0,
            save_every=0,
            text=Text(max_length=case.length, packing=settings.arm in (PACKED, CACHED)),
            cache=Cache(path=f"{folder}/states" if settings.arm == CACHED else ""),
            on_policy=OnPolicyText(share=case.on_policy, max_new_tokens=case.answer),
        )
        dtype = getattr(torch, self.config.dtype)
        self.target = random_lm(case.target, settings.device, dtype, 0).requires_grad_(False)
        self.draft = random_lm(case.draft, settings.device, torch.float32, 1)
        examples = tokenise(rows, self.tokenizer)
        self.batches = make_batches(self.config.text, self.config, examples, self.tokenizer)


def ours(x: Inputs, gate: Gate) -> None:
    config, vocab = x.config, len(x.tokenizer)
    accelerator = start(config)
    batches: StepBatches = x.batches
    if config.on_policy.share:
        batches = OnPolicy(
            config.on_policy, x.batches, Snapshot(x.draft, x.target.dtype), x.tokenizer
        )

    class Watched(Distillation):
        def observe(self, means: dict[str, float]) -> None:
            super().observe(means)
            gate.losses.append(means["loss"])

    keep = (config.cache, config.data, config.warp)
    teacher = open_teacher(*keep, accelerator, x.target, x.tokenizer, x.batches)
    loss = stages(config.loss, config.steps)
    objective = Watched(x.draft, teacher, loss, vocab_size=vocab, warp=config.warp)
    fit(accelerator, objective, Gated(batches, gate), config, Run(config.out, "", main=True))


def theirs(x: Inputs, gate: Gate, steps: int, *, checkpointing: bool) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            gate()

    class Watched(GKDTrainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            gate.tokens = gate.tokens + (inputs["labels"][:, 1:] != -100).sum()
            gate.losses.append(loss.detach())
            return loss

    c = x.config
    arguments = GKDConfig(
        output_dir=c.out,
        max_steps=steps,
        per_device_train_batch_size=c.batch_size,
        train_sampling_strategy="sequential",
        learning_rate=c.lr,
        lr_scheduler_type="constant",
        weight_decay=c.weight_decay,
        adam_beta1=c.beta1,
        adam_beta2=c.beta2,
        max_grad_norm=c.clip_norm,
        bf16=c.dtype == "bfloat16",
        gradient_checkpointing=checkpointing,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=gate.device == "cpu",
        max_length=c.text.max_length,
        beta=0.0,
        lmbda=c.on_policy.share,
        temperature=c.on_policy.temperature,
        max_new_tokens=c.on_policy.max_new_tokens,
    )
    rows = Dataset.from_list(list(their_rows(x.batches, c, steps)))
    Watched(
        x.draft,
        x.target,
        arguments,
        train_dataset=rows,
        processing_class=x.tokenizer,
        callbacks=[Steps()],
    ).train()


def their_rows(batches: Batches, config: DistillConfig, steps: int) -> Iterator[dict[str, Any]]:
    """The rows of our batches as their collator wants them."""
    for step in range(steps):
        b = batches.batch(step, 0, 0, accumulation=1, world=1)
        for ids_T, mask_T in zip(b.input_ids, b.loss_mask, strict=True):
            end = int(mask_T.nonzero()[-1]) + 2
            asked = config.on_policy
            prompt = prompt_of(ids_T, mask_T, asked.prompt_tokens if asked.share else 1)
            mask = [0] * len(prompt) + [1] * (end - len(prompt))
            yield {"input_ids": ids_T[:end].tolist(), "completion_mask": mask, "prompt": ""}


def work(settings: Bench, case: Case) -> None:
    """An arm's process."""
    gate = Gate(settings.device, case.steps)
    with tempfile.TemporaryDirectory() as folder:
        x = Inputs(case, settings, folder)
        if settings.arm in (PEER, DEFAULTS):
            steps = case.steps * (1 + settings.pairs) + 1
            theirs(x, gate, steps, checkpointing=settings.arm == DEFAULTS)
        else:
            ours(x, gate)
