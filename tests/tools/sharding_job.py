"""Run by test_sharding.py, in its process or under `accelerate launch`: distils a tiny draft, is
cut short, resumes in the same processes, and leaves records and whole weights in FOLDER/NAME.

sharding_job.py FOLDER '{NAME: {"steps": 4, ...}, ...}'
"""

import contextlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate import Accelerator
from bigram import settings
from tiny_heads import TOKENS, llama, words
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from draftsmith.command import guarded
from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.draft_init import start_from_target
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.taps import decoder_layers
from draftsmith.train.heldout.heldout import HeldOut, mean_output
from draftsmith.train.objectives.distillation import Distillation, Losses, stages
from draftsmith.train.run.folder import Run
from draftsmith.train.run.frozen_target import in_parts, share_out
from draftsmith.train.run.launch import start
from draftsmith.train.run.loop import fit
from draftsmith.train.run.settings import Settings
from draftsmith.train.run.sharding import mode
from draftsmith.train.teachers import store
from draftsmith.train.teachers.states import TapCache
from draftsmith.train.teachers.teachers import StateTeacher
from draftsmith.train.text.batches import Batch, Batches, Examples
from draftsmith.train.text.on_policy import Snapshot


class Interrupted(RuntimeError):
    """What a run is cut short with."""


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


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]  # of which the processes have unequal shares


def target_in_parts(accelerator: Accelerator) -> PreTrainedModel:
    """The target, of whose layers each process holds its share and says what the whole ones say."""
    whole, target = llama(), llama()
    if accelerator.num_processes == 1:
        return target
    share_out(target, accelerator.device)
    assert in_parts(target)
    here = full = 0
    for layer in decoder_layers(target):
        for weight in layer.parameters():
            assert isinstance(weight, DTensor) and not weight.requires_grad
            here += weight.to_local().untyped_storage().nbytes()
            full += weight.numel() * weight.element_size()
    assert here * accelerator.num_processes == full > 0, (here, full)
    assert fingerprint(target, words(TOKENS)) == fingerprint(whole, words(TOKENS))
    return target


def train(
    accelerator: Accelerator, config: Settings, *, tied: bool, cut_at: int, parts: bool = False
) -> nn.Module:
    """parts: of a target in parts, of which the draft begins as a part; measured in more ways."""
    main = accelerator.is_main_process
    run = Run(config.out, json.dumps({"lr": config.lr}), main=main)
    target, draft = target_in_parts(accelerator) if parts else llama(), tiny_draft(tied)
    if parts:
        start_from_target(draft, target)
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
        stages(Losses(name="0.5*ce+0.5*fkl"), config.steps),
        vocab_size=TOKENS,
        warp=SamplingParams(1.0),
    )

    more = figures_of(accelerator, target, heldout, objective, snapshot, run) if parts else dict

    def evaluate() -> dict[str, float]:
        means = mean_output(accelerator, objective.measure, heldout, 8)
        ids = torch.arange(30).view(2, 15)
        with torch.no_grad():
            copied = snapshot.take()(ids).logits
        return more() | means | {"copy": float(copied.std() + copied[1, 3, 5])}

    try:
        fit(accelerator, objective, batches, config, run, evaluate)
    finally:
        run.close()
    assert [type(p) for p in objective.parameters()] == [nn.Parameter] * len(
        list(draft.parameters())
    )
    assert (draft.lm_head.weight is draft.model.embed_tokens.weight) == tied
    return draft


def figures_of(
    accelerator: Accelerator,
    target: PreTrainedModel,
    batches: Batches,
    objective: Distillation,
    snapshot: Snapshot[LlamaForCausalLM],
    run: Run,
) -> Callable[[], dict[str, float]]:
    """What runs the target another number of times in each process: answers that one writes, a
    cache of three shards, tau of three prompts.
    """
    params = SamplingParams(1.0, max_new_tokens=12)
    heldout = HeldOut(accelerator, target, words(TOKENS), PROMPTS, params, batch_size=2)
    heldout.write_answers(run.cache / "heldout.safetensors")
    given = (run.cache / "states", target, words(TOKENS), batches, ())
    with patch.object(store, "SHARD_BYTES", 160 * 4 * target.config.hidden_size):
        cache = TapCache(*given, "float32")
        cache.fill(accelerator)
    assert len(cache) == 3
    teacher = StateTeacher(target, TOKENS, cache)

    def figures() -> dict[str, float]:
        told = mean_output(accelerator, partial(objective.measure, teacher=teacher), batches, 8)
        answered = heldout.means(objective.measure)
        tau = heldout.tau(LMDrafter(snapshot.take(), TOKENS), 3)
        return {"cached": told["loss"], "answered": answered["loss"], "tau": tau}

    return figures


def damp(optimizer: Optimizer, *_: object) -> None:
    """Adam's eps as large as a usual gradient: the weights are then known to within rounding.

    With 1e-8 an element whose gradient is nothing but the rounding of a sum takes a whole step, and
    another one on another machine. Adam no longer hides the gradient's scale, either.
    """
    for group in optimizer.param_groups:
        if "eps" in group:
            group["eps"] = 0.01


def main(argv: list[str]) -> None:
    with register_optimizer_step_pre_hook(damp):
        train_all(argv)


def train_all(argv: list[str]) -> None:
    accelerator: Accelerator | None = None
    for name, changes in json.loads(argv[1]).items():
        folder = Path(argv[0]) / name
        cut_at = changes.pop("cut_at", -1)
        how = {"tied": changes.pop("tied", True), "parts": changes.pop("parts", False)}
        config = settings(folder, **changes)
        # DeepSpeed allows one in a process; the runs share all that it is made from.
        accelerator = accelerator or start(config)
        if cut_at >= 0:
            with contextlib.suppress(Interrupted):
                train(accelerator, config, cut_at=cut_at, **how)
            accelerator.free_memory()
            accelerator.wait_for_everyone()
        draft = train(accelerator, config, cut_at=-1, **how)
        if accelerator.is_main_process:
            torch.save(dict(draft.state_dict()), folder / "weights.pt")
            (folder / "mode.txt").write_text(mode(accelerator))
        accelerator.free_memory()


if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))
