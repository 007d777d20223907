"""What a run will hold in memory, computed before it starts; refused where it doesn't fit.

The keys and values are exact. The working memory of a round and of a prefill is the largest of
their stages, each the tensors that are alive together in it, as `decode/engine/round.py` runs them
uncompiled (compiled ones need less). Kernels' own workspaces aren't counted, nor are weights: what
is free once the models are loaded is what a run can use.

Shapes: B rows, N nodes, I inner nodes, L = D + 1 tokens that one round can emit, V vocabulary.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from draftsmith.decode.forward.kv import round_up, windowed
from draftsmith.decode.forward.size import ModelSize, at_once
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import LAST_DRAWN, WITH_REPLACEMENT, WITHOUT_REPLACEMENT
from draftsmith.decode.tree_shapes import DynamicTree, Plan, StaticTree, chain_plan
from draftsmith.decode.verify.rules import RULES

GIB = 1 << 30
# Noise is made of 64-bit integers, two arrays alive at once: times its fp32 bytes. (On a CPU with a
# compiler it takes no more than these.)
RACE = 4
# Copies of the logits that are alive together while they are transformed, the raw ones included.
FILTERED, SORTED = 2.25, 6.0
# Of rules by rejection: copies of [B, N, V] and of [B, I, V] at their largest.
COPIES = {"block": (2, 5), "leviathan": (2, 7), "recursive": (2, 7), "traversal": (3, 4)}
COPIES |= {"k-seq": (2, 6), "multi-draft": (3, 5)}
# Of another law to verify against: copies of [B, I, V].
MIXED = 7


@dataclass(frozen=True)
class Work:
    """What is to be decoded. prompt, new: the longest prompt and answer, in tokens; tree: the
    largest that may be asked for, None for plain decoding; lossy: whether an extra acceptance wants
    the draft's logits; scratch: the drafter's; waits: tokens that a drafter in the target's pool
    takes in at once.
    """

    rows: int
    prompt: int
    new: int
    vocab: int
    params: SamplingParams
    tree: Plan | None = None
    rule: str = "coupled"
    lossy: bool = False
    scratch: int = 0
    waits: int = 0

    @property
    def slots(self) -> int:
        """Slots a row: its tokens, the pending one, and the tree's or what is tried in their place
        between rounds.
        """
        tree = 1 if self.tree is None else max(self.tree.nodes, self.tree.slots)
        return round_up(self.prompt + self.new + 1 + max(tree, self.scratch, self.waits))


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of the pools, of the working memory of a prefill of all rows, and of a round; what they
    were computed from; free: what there is.
    """

    target_kv: int
    drafter_kv: int
    prefill: int
    tree: int
    work: Work
    target: ModelSize
    drafter: ModelSize | None
    free: int | None = None

    @property
    def kv(self) -> int:
        return self.target_kv + self.drafter_kv

    @property
    def total(self) -> int:
        """The most that is held at one time."""
        return self.kv + max(self.prefill, self.tree)

    def __str__(self) -> str:
        parts = f"KV {size(self.kv)}, prefill {size(self.prefill)}, tree {size(self.tree)}"
        return parts if self.free is None else f"{parts} of {size(self.free)} free"


def plan(work: Work, target: ModelSize, drafter: ModelSize | None) -> MemoryPlan:
    """What `work` will hold. drafter: None where the drafter has no model."""
    prefill, own_kv = _prefill(work, target), 0
    if drafter is not None:
        own_kv = drafter.kv(work.rows, work.slots)
        if drafter.config.num_hidden_layers:
            # It reads the states that the target's left, of all tokens.
            taps = work.rows * work.prompt * target.handed * target.dtype.itemsize
            prefill = max(prefill, taps + _prefill(work, drafter))
    target_kv, tree = target.kv(work.rows, work.slots), _round(work, target, drafter)
    if work.scratch:  # it is tried as a chain is verified
        tree = max(tree, _round(replace(work, tree=chain_plan(work.scratch)), target, None))
    return MemoryPlan(target_kv, own_kv, prefill, tree, work, target, drafter)


def check(plan: MemoryPlan, free: int | None) -> MemoryPlan:
    """The plan with `free` bytes noted; ValueError, naming what would fit, where it needs more."""
    plan = replace(plan, free=free)
    if free is None or plan.total <= free:
        return plan
    work = plan.work
    lone = replace(plan, work=replace(work, rows=1, new=1))
    offers = []
    if rows := _most(plan, free, "rows", range(1, work.rows)):
        offers.append(f"batch_size={rows}")
    if new := _most(plan, free, "new", range(1, work.new)):
        offers.append(f"max_new_tokens={new}")
    offers += _smaller_tree(plan, free)
    if not offers and (prompt := _most(lone, free, "prompt", range(1, work.prompt))):
        offers.append(f"batch_size=1 with prompts of at most {prompt} tokens")
    fits = " or ".join(offers) + " would fit" if offers else "not even one row of one token fits"
    raise ValueError(
        f"memory: got batch_size={work.rows} with rows of {work.prompt + work.new} tokens, which "
        f"need {size(plan.total)} ({plan}), expected at most {size(free)}; {fits}"
    )


def size(count: int) -> str:
    """`1.2 GiB`, or `34 MiB` where that is less than a tenth."""
    return f"{count / GIB:.1f} GiB" if count >= GIB // 10 else f"{count / (1 << 20):.0f} MiB"


def _most(
    made: MemoryPlan, free: int, name: str, values: range, meant: Callable[[int], Any] = int
) -> int:
    """The largest of `values` that fits, 0 if none; meant: what of `Work` a value stands for."""

    def total(value: int) -> int:
        changes: dict[str, Any] = {name: meant(value)}
        return plan(replace(made.work, **changes), made.target, made.drafter).total

    fitting = bisect_right(values, free, key=total)
    return values[fitting - 1] if fitting else 0


def _smaller_tree(made: MemoryPlan, free: int) -> list[str]:
    """The largest part of the tree asked for that fits, as a setting: SpecMemo's question (arXiv
    2506.01986). A dynamic tree loses nodes, any other its deepest levels.
    """
    tree = made.work.tree
    if isinstance(tree, DynamicTree):
        fewer = partial(replace, tree)
        nodes = _most(made, free, "tree", range(2, tree.nodes), lambda n: fewer(nodes=n))
        sharp = "" if tree.sharpness == 1 else f",{tree.sharpness:g}"
        return [f"tree=dynamic:{tree.levels},{tree.width},{nodes}{sharp}"] if nodes else []
    levels = 0 if tree is None else _most(made, free, "tree", range(1, tree.levels), tree.cut)
    return [f"K={levels}"] if levels else []


def _copies(params: SamplingParams) -> float:
    """Logits alive while they are transformed, in units of the fp32 ones."""
    filtered = FILTERED if params.top_k or params.min_p else 1.0
    scaled = params.temperature not in (0, 1)
    return (SORTED if params.top_p < 1 else filtered) + scaled


def _prefill(work: Work, model: ModelSize) -> int:
    tokens, row = work.rows * work.prompt, 4 * work.rows * work.vocab
    # A windowed layer's mask is the model's own: boolean, the same for all rows.
    mask = work.prompt**2 if windowed(model.config) else 0
    noise = 0 if work.params.greedy else RACE * row
    states = tokens * model.config.hidden_size * model.dtype.itemsize
    return max(tokens * model.token + mask, states + max(noise, int(_copies(work.params) * row)))


def _round(work: Work, target: ModelSize, drafter: ModelSize | None) -> int:
    """The largest stage of a round: noise, drafting, the target's forward, its logits, the rule."""
    tree, rule = work.tree, RULES["coupled" if work.params.greedy else work.rule]
    nodes, levels = (1, 0) if tree is None else (tree.nodes, tree.levels)
    row = 4 * work.rows * work.vocab  # bytes of [B, V] in fp32
    shared = 0 if work.params.greedy or not rule.identical else (levels + 1) * row
    stages = [RACE * shared]
    q_logits = 0
    if tree is not None and drafter is not None:
        drafting, q_logits = _drafting(work, tree, drafter, work.lossy or not rule.identical)
        stages.append(shared + drafting)
    held = shared + q_logits
    mask = target.mask(work.rows, nodes, work.slots)
    stages.append(held + work.rows * nodes * (target.token + target.fresh) + mask)
    cast = 1 if target.dtype.itemsize >= 4 else 1.5  # the product, and its fp32 copy
    stages.append(held + int(max(cast, _copies(work.params)) * nodes * row))
    chain = tree is None or tree.is_chain
    if work.lossy:
        stages.append(held + MIXED * q_logits + 2 * nodes * row)
    if rule.identical:
        copies = 1 if work.params.greedy else 2 if chain else 3
        stages.append(held + copies * nodes * row)
    else:
        of_nodes, of_inner = COPIES[work.rule]
        # And one row: the race for the token after the path.
        stages.append(of_nodes * nodes * row + of_inner * q_logits + row)
    if drafter is not None and drafter.shadow:  # beside the target's
        sides = min(drafter.shadow, at_once(work.rows, nodes))
        stages.append(held + int((sides + max(2, _copies(work.params))) * nodes * row))
    return max(stages)


def _drafting(work: Work, tree: Plan, drafter: ModelSize, want_q: bool) -> tuple[int, int]:
    """(bytes at the most while drafting, bytes of the draft logits that the tree then carries)."""
    row, greedy = 4 * work.rows * work.vocab, work.params.greedy
    copies = _copies(work.params)
    if isinstance(tree, StaticTree):
        fed, drafted = max(tree.fed), sum(tree.fed) * row if want_q else max(tree.fed) * row
        children = max(Counter(map(len, tree.paths)).values())
        # A rule may want every call's logits; scores are made from the last ones.
        call = max(copies - 1, 0 if greedy else 1) * fed * row
    else:
        fed, drafted, children = tree.width, 0, tree.width
        # The last call's logits and scores go when the next ones come.
        call = max(copies + 2, 3 if greedy else 4) * fed * row
    law = RULES["coupled" if greedy else work.rule].law
    own = {WITH_REPLACEMENT: children, WITHOUT_REPLACEMENT: fed, LAST_DRAWN: fed}.get(law, 0)
    noise = RACE * own * row
    joined = drafted if want_q else 0
    forward = work.rows * (fed + 1) * drafter.token + drafter.mask(work.rows, fed + 1, work.slots)
    return drafted + drafter.ahead * row + max(int(call) + noise, joined, forward), joined
