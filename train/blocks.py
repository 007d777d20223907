"""Block drafters: a few layers that draft several tokens in one pass, on a frozen target.

    draftsmith train blocks recipe=block/gsm8k lr=1e-3
    accelerate launch train/blocks.py ...          (the same)

    loss = sum_A sum_k w_k [ (1 - base) D(p_{A+k}, q_k) + base D(p_{A+k}, u_k) ] / trained tokens

At each of some anchors A a block drafts x_{A+1}, x_{A+2}, ... from the target's states before A and
the token x_A; q_k with the light head, which knows the tokens drafted before, u_k without. D is a
key of losses.DIVERGENCES, ce, or a sum such as 0.1*ce+1.8*tv. head.kind names a published form
(models/heads/block.py): dflash, dflash2, dspark, domino, jetspec, treeflash.

Where this differs from the papers:
1. Every anchor of a row stands for its share of the row's trained tokens, and all is divided by the
   trained tokens of the step; they divide by the weights.
2. An anchor needs one trained token after it, not two. MASK is a vector of the head's own,
   unless `head.mask_token` names the token whose embedding it is.
3. The trunk may begin as the target's last layers (`head.init`), theirs is random.
4. DSpark's confidence head isn't here: scores that see the target's noise stand in for it.
5. The weights with the best held-out tau are kept, not the last ones.
"""

from dataclasses import dataclass, field, replace

from draftsmith.command import run_command
from draftsmith.models.target import TargetSpec
from draftsmith.train.drafts.blocks import BlockSource, open_block
from draftsmith.train.heldout.head_run import check_context, train_head
from draftsmith.train.heldout.heldout import HeldOutPrompts
from draftsmith.train.heldout.heldout import shrunk as shrunk_run
from draftsmith.train.objectives.block import Anchors, BlockObjective
from draftsmith.train.plan.refuse import refuse
from draftsmith.train.run.frozen_target import open_target
from draftsmith.train.run.launch import begin
from draftsmith.train.run.settings import Settings
from draftsmith.train.teachers.states import Cache, open_states
from draftsmith.train.text.on_policy import Text, make_batches, training_examples


@dataclass(kw_only=True)
class BlocksRun(Settings):
    """What a recipe of this entry can say."""

    entry: str = "blocks"
    target: TargetSpec
    shard_target: bool = False  # each process keeps a share of the target's decoder layers
    head: BlockSource = field(default_factory=BlockSource)
    data: str = "stdlib"  # see prompts.sources.read_source, or a folder that train/prepare.py wrote
    text: Text = field(default_factory=Text)
    loss: str = "fkl"  # D: see losses.parse_loss
    anchors: Anchors = field(default_factory=Anchors)
    cache: Cache = field(default_factory=Cache)
    heldout: HeldOutPrompts = field(default_factory=HeldOutPrompts)
    temperature: float = 1.0  # of held-out tau, and of the answers that figures are taken on
    K: int = 4  # drafted tokens a round: for tau, and the result's default
    tree: str = "chain"  # for tau
    best_metric: str = "tau"
    best_mode: str = "max"


def main(argv: list[str]) -> None:
    # ---- the recipe, this process, the run folder --------------------------------------------
    config, accelerator, run = begin(BlocksRun, argv, shrunk, refuse)
    if run is None:
        return

    # ---- the frozen target, the text, the drafter --------------------------------------------
    if config.gradient_checkpointing:
        raise ValueError("got gradient_checkpointing=true, expected false: a block is small")
    target, tokenizer = open_target(config, accelerator)
    examples = training_examples(config.data, tokenizer, few=config.target.shrink)
    batches = make_batches(config.text, config, examples, tokenizer)
    head = open_block(config.head, target, tokenizer, config.seed)
    check_context(config.text, head)

    # ---- objective, on states made as they are needed or read from a cache -------------------
    states = open_states(config.cache, accelerator, target, tokenizer, head.taps, batches)
    trained = (config.anchors, head, target, tokenizer, states)
    objective = BlockObjective(*trained, loss=config.loss).to(accelerator.device)

    # ---- fit beside held-out prompts, and save what accepted most -----------------------------
    train_head(config, argv, accelerator, run, tokenizer, objective, batches)


def shrunk(config: BlocksRun) -> BlocksRun:
    """Two steps of a tiny drafter on a tiny random target."""
    own = config.head
    token = min(own.mask_token, 0)
    head = replace(own, path="", taps=[], rank=min(own.rank, 8), mask_token=token)
    return replace(shrunk_run(config), head=head)


if __name__ == "__main__":
    run_command(main, BlocksRun)
