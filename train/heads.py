"""Medusa (arXiv 2401.10774), Hydra (2402.05109) and Chimera (2402.15758) heads on a frozen target,
Kangaroo's adapter (2404.18911), and Medusa-2.

    draftsmith train heads recipe=medusa/quickstart lr=1e-3
    accelerate launch train/heads.py ...           (the same)

    loss = sum_d decay^d sum_t l(head d at t, token t+2+d) / number of trained tokens

Head d reads the target's last state at t; Hydra's also the tokens up to t+1+d, and Hydra++'s
(`head.prefix`) the states before t through a decoder layer; Chimera (train/objectives/chimera.py)
runs such a layer for each token; Kangaroo's one depth predicts x_{t+1}. l is cross-entropy with the
text, or a divergence from the target's own distribution there (train/losses/pure.py). `joint` is
Medusa-2 (train/objectives/medusa.py): it changes the target too, and writes `target/` beside
`drafter/`.

Where this differs from the papers:
1. All depths are divided by the trained tokens of the step; the papers take means by depth.
2. Blocks have weights of their own and biases begin at 0 (the official ones repeat one block);
   Hydra's LM heads have no bias, and its recon term isn't here.
3. Medusa-2 is the self-distilled form, without a stage of heads alone before: its adapters leave
   the LM head alone, and the target keeps its precision (no 4 bits).
4. The weights with the best held-out tau are kept, not the last ones.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.command import check_least, run_command
from draftsmith.models.heads.head import Head, family, heads
from draftsmith.models.heads.medusa import Medusa
from draftsmith.models.target import TargetSpec
from draftsmith.train.heldout.head_run import check_context, train_head
from draftsmith.train.heldout.heldout import HeldOutPrompts, shrunk
from draftsmith.train.objectives.heads import HeadObjective
from draftsmith.train.objectives.medusa import JointMedusa, JointTraining
from draftsmith.train.plan.refuse import refuse
from draftsmith.train.run.frozen_target import open_target
from draftsmith.train.run.launch import begin
from draftsmith.train.run.lora import Lora
from draftsmith.train.run.settings import Settings, setting
from draftsmith.train.teachers.states import Cache, States, open_states
from draftsmith.train.text.on_policy import Text, make_batches, training_examples


@dataclass(kw_only=True)
class HeadSizes:
    """The group `head`."""

    kind: str  # medusa | hydra | clover2 | falcon, or another family of `HeadObjective`
    heads: int = 4  # tokens ahead
    layers: int = 1  # blocks of a head; of clover2, decoder layers
    own_heads: bool = True  # medusa: an LM head for each; else all multiply the target's
    prefix: bool = False  # hydra: Hydra++'s decoder layer
    dropout: float = 0.0  # of hydra
    block: int = 2  # falcon: tokens of a pass
    early: int = 2  # kangaroo: the target's layers that draft
    window: int = 512  # longspec: tokens that its own attention sees


@dataclass(kw_only=True)
class HeadsConfig(Settings):
    """What a recipe of this entry can say."""

    entry: str = "heads"
    target: TargetSpec
    shard_target: bool = False  # each process keeps a share of the target's decoder layers
    head: HeadSizes
    joint: JointTraining = field(default_factory=JointTraining)
    lora: Lora = field(default_factory=lambda: Lora(rank=32, dropout=0.05))  # of joint training
    data: str = "stdlib"  # see prompts.sources.read_source, or a folder that train/prepare.py wrote
    text: Text = field(default_factory=Text)
    loss: str = "ce"  # or a key of losses.DIVERGENCES
    decay: float = 1.0  # of a head's weight, from one depth to the next
    noise: float = 0.0  # hydra: alpha of NEFTune's noise on the states read
    state: float = 0.0  # clover2, falcon: weight of smooth-L1 to the target's states
    glance: float = 0.4  # falcon: share of wrong tokens that are shown, falling to 0
    offset: int = 0  # longspec: positions are moved by up to so many, within the target's context
    cache: Cache = field(default_factory=Cache)
    heldout: HeldOutPrompts = field(default_factory=HeldOutPrompts)
    temperature: float = 1.0  # of held-out tau, and of the answers that figures are taken on
    K: int = 4  # drafted tokens a round: for tau, and the result's default
    tree: str = "chain"  # for tau
    best_metric: str = "tau"
    best_mode: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, decay=0, noise=0)


def main(argv: list[str]) -> None:
    # ---- the recipe, this process, the run folder --------------------------------------------
    config, accelerator, run = begin(HeadsConfig, argv, shrunk, refuse)
    if run is None:
        return

    # ---- the target, the head, the text ------------------------------------------------------
    target, tokenizer = open_target(config, accelerator)
    examples = training_examples(config.data, tokenizer, few=config.target.shrink)
    batches = make_batches(config.text, config, examples, tokenizer)

    # ---- objective, on states made as they are needed or read from a cache -------------------
    head = make_head(config, target)
    states = open_states(config.cache, accelerator, target, tokenizer, head.taps, batches)
    objective = make_objective(config, head, target, tokenizer, states).to(accelerator.device)

    # ---- fit beside held-out prompts, and save what accepted most -----------------------------
    train_head(config, argv, accelerator, run, tokenizer, objective, batches)


def make_head(config: HeadsConfig, target: PreTrainedModel) -> Head:
    """Fresh heads in fp32, on the CPU; ValueError for options that don't go together."""
    kinds = {kind: family(kind, "train.objectives", "Objective") for kind in heads()}
    kinds = {kind: made for kind, made in kinds.items() if issubclass(made, HeadObjective)}
    kind, joint = config.head.kind, config.joint.enabled
    if kind not in kinds:
        raise ValueError(f"got head.kind={kind!r}, expected {' or '.join(kinds)}")
    own = kinds[kind].options
    least: Any = {"out": config.out, "steps": config.steps, "target": config.target}
    usual = HeadsConfig(**least, head=HeadSizes(kind=kind))
    others = {key for made in kinds.values() for key in made.options if key not in own}
    odd = sorted(key for key in others if setting(config, key) != setting(usual, key))
    if odd:
        raise ValueError(
            f"got {', '.join(odd)} with head.kind={kind}, which doesn't read them; leave them out"
        )
    if (joint and config.cache.path) or (config.gradient_checkpointing and not joint):
        raise ValueError(
            f"got joint={joint} with cache={config.cache.path!r}, gradient_checkpointing="
            f"{config.gradient_checkpointing}; a joint run changes the states, so it needs no "
            "cache; only it has layers to checkpoint"
        )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(config.seed)
        head: Head = kinds[kind].fresh(config, target)
    check_context(config.text, head)
    return head.init_from(target)


def make_objective(
    config: HeadsConfig,
    head: Head,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    states: States,
) -> HeadObjective:
    """What the recipe trains for."""
    how: Any = {"loss": config.loss, "decay": config.decay}
    if config.joint.enabled:
        assert isinstance(head, Medusa)
        return JointMedusa(head, target, tokenizer, config.joint, config.lora, config, **how)
    kind: Any = family(config.head.kind, "train.objectives", "Objective")
    how |= {key: setting(config, key) for key in kind.options if "." not in key}
    return kind(head, target, tokenizer, states, **how)


if __name__ == "__main__":
    run_command(main, HeadsConfig)
