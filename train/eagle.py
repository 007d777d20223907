"""Heads that go on alone from a frozen target's states: EAGLE-1 (arXiv 2401.15077), EAGLE-3
(2503.01840), P-EAGLE (2602.01469), MTP modules (2412.19437), Mixture of Attentions (2410.03804).

    draftsmith train eagle recipe=eagle3/quickstart lr=1e-3
    accelerate launch train/eagle.py ...           (the same)

    EAGLE-1: loss = sum_t smooth-L1(f'_t, f_{t+1}) + 0.1 D(p_{t+1}, q_t)      / trained tokens
    EAGLE-3: loss = sum_s 0.8^s sum_t D(p_{t+1+s}, q_{t,s})                   / trained tokens
    P-EAGLE: the same of t in A_s, which at each s is a part of the last      / trained tokens
    MTP:     EAGLE-3's with 0.6^s (`unroll.step_decay`), by the target's LM head

The head reads the target's state at t and the token x_{t+1}, and predicts x_{t+2}; f' is its
output. EAGLE-3 and MTP go on for S steps from their own outputs, as they will in decoding (the
training-time test); P-EAGLE (`head.parallel`) reads a learnt MASK there, and drafts all in one
pass. D is a key of losses.DIVERGENCES or a sum such as 0.5*fkl+0.5*tv. The target's states are
computed at each step, or kept in a folder (`cache`). EAGLE-2 is a way to decode: tree=dynamic.
`head.kind=mtp` with `head.path` goes on from the module in the target's checkpoint;
`head.kind=mixture` has EAGLE-1's loss (train/objectives/mixture.py).

Where this differs from the papers:
1. All depths are divided by the trained tokens of the step; the official code by masked ones too.
2. EAGLE-3's LM head begins as the target's rows (`head.init_head`), the official one at random.
3. Where the target's likeliest token is outside the draft vocabulary, EAGLE-3 trains on what is
   left of p; the official code leaves such positions out.
4. EAGLE-1's fc has no bias, since vLLM's has none; gradients are clipped by norm, not by value.
5. The weights with the best held-out tau are kept, not the last ones.
6. FastMTP's step s attends to step s alone, at the first step's positions, and learns the text;
   here each attends to what it will in decoding, at its own, and D compares it with p.
"""

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

from draftsmith.command import run_command
from draftsmith.models.heads.head import family
from draftsmith.models.target import TargetSpec, head_weight
from draftsmith.models.vocab import ENOUGH
from draftsmith.train.drafts.start import EagleSource, counted, open_head
from draftsmith.train.heldout.head_run import check_context, train_head
from draftsmith.train.heldout.heldout import HeldOutPrompts
from draftsmith.train.heldout.heldout import shrunk as shrunk_run
from draftsmith.train.objectives.eagle import Unroll
from draftsmith.train.plan.refuse import refuse
from draftsmith.train.run.frozen_target import open_target
from draftsmith.train.run.launch import begin
from draftsmith.train.run.settings import Settings
from draftsmith.train.teachers.states import Cache, open_states
from draftsmith.train.text.on_policy import Text, make_batches, training_examples


@dataclass(kw_only=True)
class EagleRun(Settings):
    """What a recipe of this entry can say."""

    entry: str = "eagle"
    target: TargetSpec
    shard_target: bool = False  # each process keeps a share of the target's decoder layers
    head: EagleSource = field(default_factory=EagleSource)
    data: str = "stdlib"  # see prompts.sources.read_source, or a folder that train/prepare.py wrote
    text: Text = field(default_factory=Text)
    loss: str = "fkl"  # D: see losses.parse_loss
    unroll: Unroll = field(default_factory=Unroll)
    cache: Cache = field(default_factory=Cache)
    heldout: HeldOutPrompts = field(default_factory=HeldOutPrompts)
    temperature: float = 1.0  # of held-out tau, and of the answers that figures are taken on
    K: int = 4  # drafted tokens a round: for tau, and the result's default
    tree: str = "chain"  # for tau
    best_metric: str = "tau"
    best_mode: str = "max"


def main(argv: list[str]) -> None:
    # ---- the recipe, this process, the run folder --------------------------------------------
    config, accelerator, run = begin(EagleRun, argv, shrunk, refuse)
    if run is None:
        return

    # ---- the frozen target, the text, the head -----------------------------------------------
    if config.gradient_checkpointing:
        raise ValueError("got gradient_checkpointing=true, expected false: a head has one layer")
    target, tokenizer = open_target(config, accelerator)
    examples = training_examples(config.data, tokenizer, few=config.target.shrink)
    batches = make_batches(config.text, config, examples, tokenizer)
    counts_V = counted(examples, len(head_weight(target)))
    head = open_head(config.head, target, tokenizer, counts_V, config.seed)
    coverage = head.vocab.coverage(counts_V.to(target.device))
    accelerator.print(f"the head drafts {len(head.vocab.ids_D):,} tokens: {coverage:.2%} of text")
    if coverage < ENOUGH and accelerator.is_main_process:
        warnings.warn(
            f"the tokens that the head drafts cover {coverage:.1%} of the text, expected at least "
            f"{ENOUGH:.0%}: at the rest it can't be right; raise head.draft_vocab",
            stacklevel=2,
        )
    check_context(config.text, head)

    # ---- objective, on states made as they are needed or read from a cache -------------------
    states = open_states(config.cache, accelerator, target, tokenizer, head.taps, batches)
    trained = (config.unroll, head, target, tokenizer, states)
    objective_of = family(head.kind, "train.objectives", "Objective")
    objective = objective_of(*trained, loss=config.loss).to(accelerator.device)

    # ---- fit beside held-out prompts, and save what accepted most -----------------------------
    train_head(config, argv, accelerator, run, tokenizer, objective, batches, coverage)


def shrunk(config: EagleRun) -> EagleRun:
    """Two steps of a tiny head on a tiny random target."""
    sizes: dict[str, Any] = {"heads": 0, "kv_heads": 0, "head_dim": 0, "intermediate": 0}
    few: dict[str, Any] = {"taps": [], "draft_vocab": min(config.head.draft_vocab, 256), "path": ""}
    head = replace(config.head, **sizes, **few)
    unroll = replace(config.unroll, steps=min(config.unroll.steps, 3))
    return replace(shrunk_run(config), head=head, unroll=unroll)


if __name__ == "__main__":
    run_command(main, EagleRun)
