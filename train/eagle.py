"""EAGLE-1 (arXiv 2401.15077) and EAGLE-3 (2503.01840) heads on a frozen target.

    draftsmith train eagle recipe=eagle3/quickstart lr=1e-3
    accelerate launch train/eagle.py ...           (the same)

    EAGLE-1: loss = sum_t smooth-L1(f'_t, f_{t+1}) + 0.1 D(p_{t+1}, q_t)      / trained tokens
    EAGLE-3: loss = sum_s 0.8^s sum_t D(p_{t+1+s}, q_{t,s})                   / trained tokens

The head reads the target's state at t and the token x_{t+1}, and predicts x_{t+2}; f' is its
output. EAGLE-3 goes on for S steps from its own outputs, as it will in decoding (the training-time
test). D is a key of losses.DIVERGENCES, fkl by default, or a `mix` of several. The target's states
are computed at each step, or kept in a folder (`cache`). EAGLE-2 is a way to decode: tree=dynamic.

Where this differs from the papers:
1. All depths are divided by the trained tokens of the step; the official code by masked ones too.
2. EAGLE-3's LM head begins as the target's rows (`init_head`), the official one at random.
3. Where the target's likeliest token is outside the draft vocabulary, EAGLE-3 trains on what is
   left of p; the official code leaves such positions out.
4. EAGLE-1's fc has no bias, since vLLM's has none; gradients are clipped by norm, not by value.
5. The weights with the best held-out tau are kept, not the last ones.
"""

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.command import run_command
from draftsmith.decode.drafters.eagle import EagleDrafter
from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.target import split_head, vocab_size
from draftsmith.models.vocab import ENOUGH
from draftsmith.train.drafts.eagle_start import EagleSource, counted, open_head
from draftsmith.train.objectives import head_run
from draftsmith.train.objectives.eagle import EagleObjective
from draftsmith.train.objectives.head_run import HeadRun, evaluate_head, kept_figures, save_head
from draftsmith.train.objectives.heldout import open_heldout
from draftsmith.train.run import recipe
from draftsmith.train.run.frozen_target import open_target
from draftsmith.train.run.launch import start
from draftsmith.train.run.loop import fit
from draftsmith.train.run.result import made_by
from draftsmith.train.teachers.states import States, open_states
from draftsmith.train.text.on_policy import Snapshot, make_batches, training_examples


@dataclass(kw_only=True)
class EagleRun(HeadRun, EagleSource):
    """What a recipe of this entry can say."""

    entry: str = "eagle"
    unroll: int = 7  # S; of EAGLE-1, the depths that are measured
    step_decay: float = 0.8  # of EAGLE-3, from one step to the next
    loss: str = "fkl"
    mix: dict[str, float] = field(default_factory=dict)  # in place of loss: losses with weights
    token_weight: float = 0.1  # of EAGLE-1's D
    noise: float = 0.2  # of EAGLE-1, on the target's states


def main(argv: list[str]) -> None:
    # ---- the recipe, this process, the run folder --------------------------------------------
    config = recipe.load(EagleRun, argv)
    config = shrunk(config) if config.target.shrink else config
    accelerator = start(config)
    run = recipe.run_of(config, main=accelerator.is_main_process)
    result = run.folder / "drafter"
    if run.finished():
        accelerator.print(f"{result} is finished: nothing to do")
        return
    accelerator.print(recipe.show(config))

    # ---- the frozen target, the text, the head -----------------------------------------------
    config.target = config.target.resolved(config.dtype)
    target, tokenizer = open_target(config, accelerator)
    examples = training_examples(config.data, tokenizer, few=config.target.shrink)
    batches = make_batches(
        config, examples, tokenizer, batch_size=config.batch_size, seed=config.seed
    )
    counts_V = counted(examples, len(split_head(target)[1]))
    head = open_head(config, target, tokenizer, counts_V, config.seed)
    coverage = head.vocab.coverage(counts_V.to(target.device))
    drafted = len(head.vocab.ids_D)
    accelerator.print(f"the head drafts {drafted:,} tokens: {coverage:.2%} of text")
    if coverage < ENOUGH and accelerator.is_main_process:
        warnings.warn(
            f"the tokens that the head drafts cover {coverage:.1%} of the text, expected at least "
            f"{ENOUGH:.0%}: at the rest it can't be right; raise draft_vocab",
            stacklevel=2,
        )
    head_run.check_context(config, head)

    # ---- objective, on states made as they are needed or read from a cache -------------------
    states = open_states(config, accelerator, target, tokenizer, head.taps, batches)
    objective = make_objective(config, head, target, tokenizer, states).to(accelerator.device)

    # ---- held-out prompts, and what the target writes to them --------------------------------
    params, cache = config.params, run.cache
    heldout = open_heldout(config, params, accelerator, target, tokenizer, cache)
    snapshot = Snapshot(head, target.dtype)

    def evaluate() -> dict[str, float]:
        drafter = EagleDrafter(snapshot.take(), target, vocab_size(tokenizer))
        return evaluate_head(config, heldout, objective.measure, drafter)

    # ---- fit, and keep what accepted most ----------------------------------------------------
    ended = fit(accelerator, objective, batches, config, run, evaluate)
    run.load_best(objective)

    # ---- save --------------------------------------------------------------------------------
    if accelerator.is_main_process:
        made = made_by(argv, config.seed, examples, ended) | kept_figures(run, ended)
        made["coverage"] = coverage
        made["samples"] = head_run.samples_seen(config, examples, batches, ended, accelerator)
        path = config.target.path
        save_head(config, result, head, target, tokenizer, target_path=path, made=made)
        run.finish({"result": str(result), **ended._asdict()})
        print(f"saved {result}")


def make_objective(
    config: EagleRun,
    head: Eagle,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    states: States,
) -> EagleObjective:
    """What the recipe trains for."""
    if config.gradient_checkpointing:
        raise ValueError("got gradient_checkpointing=true, expected false: a head has one layer")
    return EagleObjective.of(config, head, target, tokenizer, states, mix=config.mix)


def shrunk(config: EagleRun) -> EagleRun:
    """Two steps of a tiny head on a tiny random target."""
    sizes: dict[str, Any] = {"heads": 0, "kv_heads": 0, "head_dim": 0, "intermediate": 0}
    few: dict[str, Any] = {"taps": [], "draft_vocab": min(config.draft_vocab, 256), "draft": ""}
    return replace(head_run.shrunk(config), unroll=min(config.unroll, 3), **sizes, **few)


if __name__ == "__main__":
    run_command(main, EagleRun)
