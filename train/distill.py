"""Distillation of a draft LM from its target (DistillSpec, arXiv 2310.08461; GKD, 2306.13649).

    draftsmith train distill recipe=quickstart/distill lr=1e-4
    accelerate launch train/distill.py ...           (the same)

    loss = sum_t w_t D(p_t, q_t) / number of tokens,   p_t = target(x_<t), q_t = draft(x_<t)

D is fkl, rkl, jsd, tv, tvpp, nla, lk, match or ce, or a weighted sum of them
(train/losses/pure.py), and may be another one in a second stage. Both sides go through the one
transform (vocabulary cut, temperature, top-k, top-p). w is 1, or chosen by `tokens.select`
(AdaSPEC) or `tokens.by_depth` (train/losses/token_selection.py). The text x is what `data` names:
ground truth, or the target's own answers (of train/prepare.py; with loss=ce that is sequence-level
distillation); at a share `on_policy` (lambda) of the steps the draft writes the answers itself, and
no gradient goes through its sampling. `head.weight` trains an acceptance head along:
train/scoring/joint.py; `pard.levels` a draft that drafts several tokens in a pass:
train/tuning/pard.py.

Where this differs from DistillSpec:
1. The mean is over all trained tokens of the step, not within each sequence first.
2. One draw of lambda a step decides for all processes; it is a function of (seed, step).
3. The draft writes at `on_policy.temperature`, 1 by default; p and q are compared at `temperature`,
   that of the draft's later use. The paper compares at 1.
4. JSD's beta is strictly between 0 and 1; its limits have names of their own, fkl and rkl.
5. The weights with the best held-out acceptance are kept, not the last ones.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.command import run_command
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.disk.provenance import provenance
from draftsmith.models.target import TargetSpec, vocab_size
from draftsmith.train.drafts.start import TINY, ModelStart, open_draft, open_reference
from draftsmith.train.heldout.heldout import HeldOutPrompts, draft_figures, open_heldout
from draftsmith.train.heldout.heldout import shrunk as shrunk_run
from draftsmith.train.losses.token_selection import Weighting
from draftsmith.train.objectives.distillation import Distillation, Losses, stages
from draftsmith.train.plan.refuse import refuse
from draftsmith.train.run.frozen_target import offloaded, open_target
from draftsmith.train.run.launch import begin
from draftsmith.train.run.loop import StepBatches, fit
from draftsmith.train.run.lora import Lora, to_save
from draftsmith.train.run.result import save_draft
from draftsmith.train.run.settings import Settings
from draftsmith.train.scoring.joint import JointHead, open_head
from draftsmith.train.scoring.result import finish_head
from draftsmith.train.teachers.states import Cache
from draftsmith.train.teachers.teachers import Teacher, open_teacher
from draftsmith.train.text import on_policy
from draftsmith.train.text.on_policy import OnPolicyText, Snapshot, Text
from draftsmith.train.tuning.pard import Pard, PardDistillation, masked


@dataclass(kw_only=True)
class DistillConfig(Settings):
    """What a recipe of this entry can say."""

    entry: str = "distill"
    target: TargetSpec
    shard_target: bool = False  # each process keeps a share of the target's decoder layers
    draft: ModelStart = field(default_factory=ModelStart)
    allow_target_mismatch: bool = False  # go on from a draft that was made for another target
    lora: Lora = field(default_factory=Lora)
    data: str = "stdlib"  # see prompts.sources.read_source, or a folder that train/prepare.py wrote
    text: Text = field(default_factory=Text)
    on_policy: OnPolicyText = field(default_factory=OnPolicyText)
    loss: Losses = field(default_factory=Losses)
    tokens: Weighting = field(default_factory=Weighting)
    pard: Pard = field(default_factory=Pard)
    temperature: float = 1.0  # of the comparison, and of the held-out measures
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    cache: Cache = field(default_factory=Cache)
    head: JointHead = field(default_factory=JointHead)
    heldout: HeldOutPrompts = field(default_factory=HeldOutPrompts)
    K: int = 4  # drafted tokens a round: for tau, and the result's default
    best_metric: str = "alpha"
    best_mode: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.pard.levels < self.K:
            raise ValueError(f"got K={self.K}, expected at most pard.levels={self.pard.levels}")
        if self.pard.levels and self.best_metric == "alpha":  # which is the first token's
            self.best_metric = "tau"

    @property
    def warp(self) -> SamplingParams:
        """How both sides' logits become distributions, and held-out answers are written."""
        law, long = (self.temperature, self.top_k, self.top_p), self.heldout.max_new_tokens
        return SamplingParams(*law, long, min_p=self.min_p)


def main(argv: list[str]) -> None:
    # ---- the recipe, this process, the run folder --------------------------------------------
    config, accelerator, run = begin(DistillConfig, argv, shrunk, refuse)
    if run is None:
        return

    # ---- the frozen target, the draft --------------------------------------------------------
    target, tokenizer = open_target(config, accelerator)
    begins = (config.draft, config.lora, config.allow_target_mismatch)
    draft = open_draft(*begins, target, tokenizer, config.seed)
    if config.pard.levels:
        draft = masked(draft, tokenizer, config.pard)
    snapshot = Snapshot(draft, target.dtype)
    if config.gradient_checkpointing:
        draft.gradient_checkpointing_enable({"use_reentrant": False})

    # ---- text to compare them on, as it is or with answers of the draft ----------------------
    examples = on_policy.training_examples(config.data, tokenizer, few=config.target.shrink)
    text = on_policy.make_batches(config.text, config, examples, tokenizer)
    batches: StepBatches = text
    if config.on_policy.share:
        rows = on_policy.make_batches(config.text, config, examples, tokenizer, packing=False)
        batches = on_policy.OnPolicy(config.on_policy, rows, snapshot, tokenizer)

    # ---- objective ---------------------------------------------------------------------------
    keep = (config.cache, config.data, config.warp)
    teacher = open_teacher(*keep, accelerator, target, tokenizer, text, draft)
    reference = open_reference(config.tokens.reference, target, tokenizer)
    objective = make_objective(config, draft, teacher, tokenizer, reference).to(accelerator.device)

    # ---- held-out prompts, and what the target writes to them --------------------------------
    heldout = open_heldout(config, config.warp, accelerator, target, tokenizer, run)
    evaluate = offloaded(config, target, draft_figures(heldout, objective, snapshot, config.K))

    # ---- fit, and keep what accepted most ----------------------------------------------------
    ended = fit(accelerator, objective, batches, config, run, evaluate)
    run.load_best(objective)

    # ---- save --------------------------------------------------------------------------------
    if accelerator.is_main_process:
        draft = to_save(draft, run.folder / "adapter", config.save_dtype)
        made = provenance(argv, config.seed, examples.fingerprint(), ended.best_step, ended.best)
        result = run.folder / "drafter"
        save_draft(result, draft, target, tokenizer, config, made)
        if objective.head is not None:
            finish_head(objective.head.scorer, config, run, target, tokenizer, made)
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
    head = open_head(config.head, draft.config.hidden_size, teacher, config.warp, config.seed)
    given = (draft, teacher, stages(config.loss, config.steps))
    how: Any = {"warp": config.warp, "weighting": config.tokens, "reference": reference}
    how |= {"vocab_size": vocab_size(tokenizer), "head": head}
    if config.pard.levels:
        return PardDistillation(config.pard, *given, **how)
    return Distillation(*given, **how)


def shrunk(config: DistillConfig) -> DistillConfig:
    """Two steps of a tiny draft, without reference."""
    few = replace(config.on_policy, prompt_tokens=8, max_new_tokens=8)
    short: dict[str, Any] = {"on_policy": few, "draft": TINY, "lora": Lora()}
    if config.head.weight:  # cold, random models disagree
        short |= {"temperature": 0.1, "head": replace(config.head, limit=40)}
    if config.tokens.reference:  # of the real draft
        short["tokens"] = replace(config.tokens, reference="", select="random")
    return replace(shrunk_run(config), **short)


if __name__ == "__main__":
    run_command(main, DistillConfig)
