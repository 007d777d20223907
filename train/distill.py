"""Distillation of a draft LM from its target (DistillSpec, arXiv 2310.08461; GKD, 2306.13649).

    draftsmith train distill recipe=quickstart/distill lr=1e-4
    accelerate launch train/distill.py ...           (the same)

    loss = sum_t w_t D(p_t, q_t) / number of tokens,   p_t = target(x_<t), q_t = draft(x_<t)

D is fkl, rkl, jsd, tv, tvpp, nla, lk or ce, or a weighted sum of them (train/losses/pure.py), and
may be another one in a second stage. Both sides go through the one transform (vocabulary cut,
temperature, top-k, top-p). w is 1, or chosen by `select` (AdaSPEC) or `by_depth`
(train/objectives/token_selection.py). The text x is what `data` names: ground truth, or the
target's own answers (a folder of train/prepare.py;
with loss=ce that is sequence-level distillation); at a share `on_policy` (lambda) of the steps the
draft writes the answers itself. No gradient goes through its sampling. With `head_weight` an
acceptance head (SpecDec++) is trained along: train/scoring/joint.py.

Where this differs from DistillSpec:
1. The mean is over all trained tokens of the step, not within each sequence first.
2. One draw of lambda a step decides for all processes; it is a function of (seed, step).
3. The draft writes at `sample_temperature`, 1 by default; p and q are compared at `temperature`,
   that of the draft's later use. The paper compares at 1.
4. JSD's beta is strictly between 0 and 1; its limits have names of their own, fkl and rkl.
5. The weights with the best held-out acceptance are kept, not the last ones.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.command import run_command
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.target import vocab_size
from draftsmith.train.drafts.draft_start import TINY, DraftSource, open_draft, open_reference
from draftsmith.train.objectives.distillation import Distillation, Losses
from draftsmith.train.objectives.heldout import draft_figures
from draftsmith.train.objectives.token_selection import Weighting
from draftsmith.train.run import recipe
from draftsmith.train.run.frozen_target import FrozenTarget, open_target
from draftsmith.train.run.launch import start
from draftsmith.train.run.loop import StepBatches, fit
from draftsmith.train.run.lora import to_save
from draftsmith.train.run.result import made_by, save_draft
from draftsmith.train.run.settings import Settings
from draftsmith.train.scoring.joint import JointHead, open_head
from draftsmith.train.scoring.record import finish_head
from draftsmith.train.teachers.states import Cache
from draftsmith.train.teachers.teachers import Teacher, open_teacher
from draftsmith.train.text.on_policy import (
    OnPolicy,
    OnPolicyText,
    Snapshot,
    make_batches,
    text_at_hand,
    training_examples,
)


@dataclass(kw_only=True)
class DistillConfig(
    Settings, FrozenTarget, DraftSource, OnPolicyText, Losses, Weighting, Cache, JointHead
):
    """What a recipe of this entry can say."""

    entry: str = "distill"
    temperature: float = 1.0  # of the comparison, and of the held-out measures
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    heldout_data: str = ""  # empty: the held-out side of data
    heldout_prompts: int = 32
    K: int = 4  # drafted tokens a round: for tau, and the result's default
    best_metric: str = "alpha"
    best_mode: str = "max"

    @property
    def whole_target_for(self) -> str:
        why = "whose head is calibrated by one process, which can't run the target alone"
        return f"head_weight={self.head_weight}, {why}" if self.head_weight else ""

    @property
    def warp(self) -> SamplingParams:
        """How both sides' logits become distributions, and on-policy answers are drawn."""
        return SamplingParams(
            self.temperature, self.top_k, self.top_p, self.max_new_tokens, min_p=self.min_p
        )


def main(argv: list[str]) -> None:
    # ---- the recipe, this process, the run folder --------------------------------------------
    config = recipe.load(DistillConfig, argv)
    config = shrunk(config) if config.target.shrink else config
    accelerator = start(config)
    run = recipe.run_of(config, main=accelerator.is_main_process)
    result = run.folder / "drafter"
    if run.finished():
        accelerator.print(f"{result} is finished: nothing to do")
        return
    accelerator.print(recipe.show(config))

    # ---- the frozen target, the draft --------------------------------------------------------
    config.target = config.target.resolved(config.dtype)
    target, tokenizer = open_target(config, accelerator)
    draft = open_draft(config, target, tokenizer, config.seed)
    snapshot = Snapshot(draft, target.dtype)
    if config.gradient_checkpointing:
        draft.gradient_checkpointing_enable({"use_reentrant": False})

    # ---- text to compare them on, as it is or with answers of the draft ----------------------
    examples = training_examples(config.data, tokenizer, few=config.target.shrink)
    order: dict[str, Any] = {"batch_size": config.batch_size, "seed": config.seed}
    text = make_batches(config, examples, tokenizer, **order)
    batches: StepBatches = text
    if config.on_policy:
        rows = make_batches(config, examples, tokenizer, packing=False, **order)
        batches = OnPolicy(config, rows, snapshot, tokenizer)

    # ---- objective ---------------------------------------------------------------------------
    teacher = open_teacher(config, accelerator, target, tokenizer, text, draft)
    reference = open_reference(config.reference, target, tokenizer)
    objective = make_objective(config, draft, teacher, tokenizer, reference)
    objective.to(accelerator.device)

    # ---- held-out prompts, and what the target writes to them --------------------------------
    evaluate = draft_figures(config, accelerator, objective, snapshot, target, tokenizer, run.cache)

    # ---- fit, and keep what accepted most ----------------------------------------------------
    ended = fit(accelerator, objective, batches, config, run, evaluate)
    run.load_best(objective)

    # ---- save --------------------------------------------------------------------------------
    if accelerator.is_main_process:
        draft = to_save(draft, run.folder / "adapter", config.save_dtype)
        made = made_by(argv, config.seed, examples, ended, acceptance=ended.best)
        path = config.target.path
        save_draft(result, draft, target, tokenizer, target_path=path, made=made, K=config.K)
        if objective.head is not None:
            scorer = objective.head.scorer
            finish_head(config, run, result, scorer, target, tokenizer, made)
        run.finish({"result": str(result), **ended._asdict()})
        print(f"saved {result}")


def make_objective(
    config: DistillConfig,
    draft: PreTrainedModel,
    teacher: Teacher,
    tokenizer: PreTrainedTokenizerBase,
    reference: PreTrainedModel | None,
) -> Distillation:
    """What the recipe trains for."""
    return Distillation(
        draft,
        teacher,
        config,
        vocab_size=vocab_size(tokenizer),
        warp=config.warp,
        weighting=config,
        reference=reference,
        head=open_head(config, draft.config.hidden_size, teacher),
    )


def shrunk(config: DistillConfig) -> DistillConfig:
    """Two steps of a tiny draft and a tiny random target, without cache and reference: shows that a
    recipe composes and runs.
    """
    prompts_from = text_at_hand(config.heldout_data or config.data)
    data = config.data if Path(config.data).exists() else prompts_from
    short: dict[str, Any] = {"steps": 2, "warmup": 0, "batch_size": 2, "prompt_tokens": 8}
    few: dict[str, Any] = {"max_new_tokens": 8, "heldout_prompts": 2, "heldout_data": prompts_from}
    few |= {"cache": "", "cache_int8": False, "cache_top_k": 0}
    if config.head_weight:  # cold, random models disagree
        few |= {"temperature": 0.1, "head_prompts": 40}
    if config.reference:  # of the real draft
        few |= {"reference": "", "select": "random"}
    return replace(config, draft="", data=data, **TINY, **short, **few)


if __name__ == "__main__":
    run_command(main, DistillConfig)
