"""Tuning a target so that it drafts for itself; writes `target/`, a plain model folder.

    draftsmith train tune recipe=layerskip/gsm8k lr=1e-4
    accelerate launch train/tune.py ...            (the same)

    exits        sum_E w_E CE(exit after E layers, text)        decodes with drafter=exit:E
    consistency  KL(model on the text || model on a guess of it) + ar CE(text)     jacobi:K
    units        CE(placeholders behind a text, what follows it) + ar CE(text)     pads:K
    prompts      KL(model on the text || model behind trained prompts)             ppd:M

`exits` is LayerSkip (arXiv 2404.16710), `consistency` CLLM (2403.00835), `units` Lexical Unit
Decoding (2405.15208), `prompts` PPD (2405.18628): a file of train/tuning each. Decoding stays
lossless, but with respect to the tuned target: how far that is from what it was is told by `loss`,
of the answers that it gave to held-out prompts before; prompts change nothing of it.

Where this differs from the papers:
1. Sums are divided by the trained tokens of the step; rows are packed for `exits`, so that a layer
   is left out of a row of texts, and what it computed is thrown away: no time is saved.
2. The weights with the best held-out tau are kept, not the last ones.
"""

from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.command import check_one_of, run_command
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.prompts.chat import set_template
from draftsmith.models.disk.provenance import provenance
from draftsmith.models.disk.store import read_lines
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.models.tokenizer import vocab_size
from draftsmith.train.heldout.heldout import HeldOut, HeldOutPrompts, open_heldout
from draftsmith.train.heldout.heldout import shrunk as shrunk_run
from draftsmith.train.plan.refuse import refuse
from draftsmith.train.run.folder import Run
from draftsmith.train.run.launch import begin
from draftsmith.train.run.loop import Evaluate, fit
from draftsmith.train.run.lora import Lora, to_save, with_lora
from draftsmith.train.run.result import evaluate_line, save_model
from draftsmith.train.run.settings import Settings
from draftsmith.train.text.on_policy import Snapshot, Text, make_batches, training_examples
from draftsmith.train.tuning.consistency import Consistency, ConsistencyObjective
from draftsmith.train.tuning.exits import ExitObjective, Exits
from draftsmith.train.tuning.prompts import Prompts, PromptsObjective, with_prompts
from draftsmith.train.tuning.units import Units, UnitsObjective

METHODS = ("exits", "consistency", "units", "prompts")
Tuned = ExitObjective | ConsistencyObjective | UnitsObjective | PromptsObjective


@dataclass(kw_only=True)
class TuneConfig(Settings):
    """What a recipe of this entry can say."""

    entry: str = "tune"
    target: TargetSpec  # or a draft LM's folder
    method: str  # exits | consistency | units | prompts
    exits: Exits = field(default_factory=Exits)
    consistency: Consistency = field(default_factory=Consistency)
    units: Units = field(default_factory=Units)
    prompts: Prompts = field(default_factory=Prompts)
    lora: Lora = field(default_factory=Lora)
    data: str = "stdlib"  # see prompts.sources.read_source, or a folder that train/prepare.py wrote
    text: Text = field(default_factory=Text)
    heldout: HeldOutPrompts = field(default_factory=HeldOutPrompts)
    temperature: float = 1.0  # of the answers that figures are taken on, and of tau
    K: int = 4  # drafted tokens a round: for tau
    best_metric: str = "tau"
    best_mode: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("method", self.method, METHODS)
        if self.target.quantise:
            raise ValueError(
                f"target.quantise: got {self.target.quantise}, expected nothing: its weights are "
                "trained; quantise the result"
            )
        alone = self.optimizer != "muon" and not (self.weight_decay or self.lora.rank)
        if self.method == "prompts" and not alone:
            raise ValueError(
                f"method=prompts: got weight_decay={self.weight_decay:g}, lora.rank="
                f"{self.lora.rank}, optimizer={self.optimizer}, expected 0 of both, and adamw or "
                "sgd: embeddings of a few tokens are all that changes"
            )
        if self.compile and self.method == "exits":
            raise ValueError("got compile=true, expected false: exits are read between its layers")


def main(argv: list[str]) -> None:
    # ---- the recipe, this process, the run folder ---------------------------------------------
    config, accelerator, run = begin(TuneConfig, argv, shrunk, refuse)
    if run is None:
        return

    # ---- the target, which learns, and a copy to decode with ----------------------------------
    weights = replace(config.target, dtype="float32")
    model, tokenizer = load_target(weights, accelerator.device)
    set_template(tokenizer, config.text.thinking, config.text.template_kwargs)
    dtype = getattr(torch, config.target.resolved(config.dtype).dtype)
    if config.method == "prompts":
        model = with_prompts(model, config.prompts, vocab_size(tokenizer))
    else:
        model = with_lora(model.requires_grad_(), config.lora, given=True, seed=config.seed)
    snapshot = Snapshot(model, dtype)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    # ---- text, objective ----------------------------------------------------------------------
    examples = training_examples(config.data, tokenizer, few=config.target.shrink)
    batches = make_batches(config.text, config, examples, tokenizer)
    objective = make_objective(config, model, tokenizer).to(accelerator.device)

    # ---- held-out prompts, and what the target wrote to them before ---------------------------
    params = config.heldout.params(config.temperature)
    heldout = open_heldout(config, params, accelerator, snapshot.take(), tokenizer, run)

    # ---- fit, and keep what drafts best -------------------------------------------------------
    evaluate = figures(config, heldout, objective, snapshot)
    ended = fit(accelerator, objective, batches, config, run, evaluate)
    run.load_best(objective)

    # ---- save ---------------------------------------------------------------------------------
    if accelerator.is_main_process:
        model = to_save(model, run.folder / "adapter", config.save_dtype)
        made = provenance(argv, config.seed, examples.fingerprint(), ended.best_step)
        result = run.folder / "target"
        save_model(result, model, tokenizer, made)
        run.finish({"result": str(result), **ended._asdict()})
        print(f"saved {result}")
        tell(config, run, objective.drafter, ended.best_step)


def make_objective(
    config: TuneConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Tuned:
    """What the recipe trains for; `drafter` is the name of what decodes with the result."""
    size = vocab_size(tokenizer)
    if config.method == "exits":
        return ExitObjective(model, config.exits, steps=config.steps, vocab_size=size)
    if config.method == "consistency":
        return ConsistencyObjective(model, config.consistency, drafted=config.K, vocab_size=size)
    if config.method == "prompts":
        return PromptsObjective(model, config.prompts, vocab_size=size)
    return UnitsObjective(model, config.units, drafted=config.K, vocab_size=size)


def figures(
    config: TuneConfig, heldout: HeldOut, objective: Tuned, snapshot: Snapshot[PreTrainedModel]
) -> Evaluate:
    """Loss on what the target wrote before it was tuned, and what else the objective measures;
    tau and MBSU, decoded with a copy of the target as it is now.
    """

    def evaluate() -> dict[str, float]:
        target = snapshot.take()
        drafter = load_drafter(objective.drafter, target, heldout.tokenizer)
        assert drafter is not None
        return heldout.means(objective.measure) | heldout.worth(drafter, config.K, target)

    return evaluate


def tell(config: TuneConfig, run: Run, drafter: str, best_step: int) -> None:
    """What tuning has changed, and the line that evaluates the result."""
    log = read_lines(run.metrics)
    first, *_, kept = [r for r in log if r["step"] in (0, best_step) and "eval_tau" in r] * 2
    for name in ("tau", "loss"):
        before, after = (record[f"eval_{name}"] for record in (first, kept))
        print(f"held-out {name}: {before:.3f} before, {after:.3f} after")
    tuned = str(run.folder / "target")
    print(evaluate_line(config, target=tuned, drafter=drafter, K=f"{config.K}"))


def shrunk(config: TuneConfig) -> TuneConfig:
    """Two steps of a tiny random target."""
    exits = replace(config.exits, layers=[], draft=0)
    return replace(shrunk_run(config), exits=exits, lora=Lora())


if __name__ == "__main__":
    run_command(main, TuneConfig)
