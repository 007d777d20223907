"""Medusa (arXiv 2401.10774) and Hydra (2402.05109) heads on a frozen target, and Medusa-2.

    draftsmith train heads recipe=medusa/quickstart lr=1e-3
    accelerate launch train/heads.py ...           (the same)

    loss = sum_d decay^d sum_t l(head d at t, token t+2+d) / number of trained tokens

Head d reads the target's last state at t; Hydra's also the tokens up to t+1+d, and Hydra++'s
(`prefix`) the states before t through a decoder layer. l is cross-entropy with the text, or a
divergence from the target's own distribution there (train/losses/pure.py). `joint` is Medusa-2
(train/objectives/medusa2.py): it changes the target too, and writes `target/` beside `drafter/`.

Where this differs from the papers:
1. All depths are divided by the trained tokens of the step; the papers take means by depth.
2. Blocks have weights of their own and biases begin at 0 (the official ones repeat one block);
   Hydra's LM heads have no bias, and its recon term isn't here.
3. Medusa-2 is the self-distilled form, without a stage of heads alone before: its adapters leave
   the LM head alone, and the target keeps its precision (no 4 bits).
4. The weights with the best held-out tau are kept, not the last ones.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.command import run_command
from draftsmith.decode.drafters.load import drafter_of
from draftsmith.models.heads.head import Head, family, heads
from draftsmith.models.heads.medusa import Medusa
from draftsmith.models.target import vocab_size
from draftsmith.train.objectives import head_run
from draftsmith.train.objectives.heads import HeadObjective
from draftsmith.train.objectives.heldout import open_heldout
from draftsmith.train.objectives.medusa2 import JointMedusa, JointRun
from draftsmith.train.run import recipe
from draftsmith.train.run.frozen_target import open_target
from draftsmith.train.run.launch import start
from draftsmith.train.run.loop import fit
from draftsmith.train.run.result import made_by, save_model
from draftsmith.train.teachers.states import States, open_states
from draftsmith.train.text.on_policy import Snapshot, make_batches, training_examples


@dataclass(kw_only=True)
class HeadsConfig(JointRun):
    """What a recipe of this entry can say."""

    entry: str = "heads"
    kind: str  # medusa | hydra, or another family of `HeadObjective`
    heads: int = 4  # tokens ahead
    layers: int = 1  # blocks of a head
    own_heads: bool = True  # medusa: an LM head for each; else all multiply the target's
    prefix: bool = False  # hydra: Hydra++'s decoder layer
    dropout: float = 0.0  # of hydra
    loss: str = "ce"  # or a key of losses.DIVERGENCES
    decay: float = 1.0  # of a head's weight, from one depth to the next
    noise: float = 0.0  # hydra: alpha of NEFTune's noise on the states read


def main(argv: list[str]) -> None:
    # ---- the recipe, this process, the run folder --------------------------------------------
    config = recipe.load(HeadsConfig, argv)
    config = head_run.shrunk(config) if config.target.shrink else config
    accelerator = start(config)
    run = recipe.run_of(config, main=accelerator.is_main_process)
    result = run.folder / "drafter"
    if run.finished():
        accelerator.print(f"{result} is finished: nothing to do")
        return
    accelerator.print(recipe.show(config))

    # ---- the target, the head, the text ------------------------------------------------------
    config.target = config.target.resolved(config.dtype)
    target, tokenizer = open_target(config, accelerator)
    examples = training_examples(config.data, tokenizer, few=config.target.shrink)
    batches = make_batches(
        config, examples, tokenizer, batch_size=config.batch_size, seed=config.seed
    )

    # ---- objective, on states made as they are needed or read from a cache -------------------
    head = make_head(config, target)
    states = open_states(config, accelerator, target, tokenizer, head.taps, batches)
    objective = make_objective(config, head, target, tokenizer, states).to(accelerator.device)

    # ---- held-out prompts, and what the target writes to them --------------------------------
    params, cache = config.params, run.cache
    heldout = open_heldout(config, params, accelerator, target, tokenizer, cache)
    snapshot = Snapshot(head, target.dtype)

    def evaluate() -> dict[str, float]:
        drafter = drafter_of(snapshot.take(), target, vocab_size(tokenizer))
        return head_run.evaluate_head(config, heldout, objective.measure, drafter)

    # ---- fit, and keep what accepted most ----------------------------------------------------
    ended = fit(accelerator, objective, batches, config, run, evaluate)
    run.load_best(objective)

    # ---- save --------------------------------------------------------------------------------
    if accelerator.is_main_process:
        made = made_by(argv, config.seed, examples, ended) | head_run.kept_figures(run, ended)
        made["samples"] = head_run.samples_seen(config, examples, batches, ended, accelerator)
        path = config.target.path
        if isinstance(objective, JointMedusa):
            target, path = objective.merged(), str(run.folder / "target")
            save_model(run.folder / "target", target, tokenizer, made)
        head_run.save_head(config, result, head, target, tokenizer, target_path=path, made=made)
        run.finish({"result": str(result), **ended._asdict()})
        print(f"saved {result}")


def make_head(config: HeadsConfig, target: PreTrainedModel) -> Head:
    """Fresh heads in fp32, on the CPU; ValueError for options that don't go together."""
    kinds = {kind: family(kind, "train.objectives", "Objective") for kind in heads()}
    kinds = {kind: made for kind, made in kinds.items() if issubclass(made, HeadObjective)}
    if config.kind not in kinds:
        raise ValueError(f"got kind={config.kind!r}, expected {' or '.join(kinds)}")
    own = kinds[config.kind].options
    usual = {field.name: field.default for field in fields(config)}
    others = {name for made in kinds.values() for name in made.options if name not in own}
    odd = sorted(name for name in others if getattr(config, name) != usual[name])
    if odd:
        raise ValueError(
            f"got {', '.join(odd)} with kind={config.kind}, which doesn't read them; leave them out"
        )
    if (config.joint and config.cache) or (config.gradient_checkpointing and not config.joint):
        raise ValueError(
            f"got joint={config.joint} with cache={config.cache!r}, gradient_checkpointing="
            f"{config.gradient_checkpointing}; a joint run changes the states, so it needs no "
            "cache; only it has layers to checkpoint"
        )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(config.seed)
        head: Head = kinds[config.kind].fresh(config, target)
    head_run.check_context(config, head)
    return head.init_from(target)


def make_objective(
    config: HeadsConfig,
    head: Head,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    states: States,
) -> HeadObjective:
    """What the recipe trains for."""
    if config.joint:
        assert isinstance(head, Medusa)
        how: Any = {"loss": config.loss, "decay": config.decay}
        return JointMedusa(head, target, tokenizer, config, **how)
    made: HeadObjective = family(config.kind, "train.objectives", "Objective").of(
        config, head, target, tokenizer, states
    )
    return made


if __name__ == "__main__":
    run_command(main, HeadsConfig)
