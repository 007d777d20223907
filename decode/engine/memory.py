"""What a run will hold in memory, computed before it starts; refused where it doesn't fit.

The keys and values are exact. The working memory of a round and of a prefill is the largest of
their stages, each the tensors that are alive together in it, as `decode/engine/round.py` runs without
compilation (compiled stages need less). Kernels' own workspaces aren't counted, nor are weights:
what is free once the models are loaded is what a run can use.

Shapes: B rows, N nodes, I inner nodes, L = D + 1 tokens that one round can emit, V vocabulary.
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from draftsmith.decode.forward.kv import kv_shape
from draftsmith.decode.forward.runner import Runner, round_up, windowed
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import WITH_REPLACEMENT, WITHOUT_REPLACEMENT
from draftsmith.decode.tree_shapes import Plan, StaticTree
from draftsmith.decode.verify.rules import RULES
from draftsmith.models.taps import NORM

GIB = 1 << 30
# Noise is made of 64-bit integers, three arrays of which are alive at once: bytes a number.
RACE = 24
# Copies of the logits that are alive together while they are transformed, the raw ones included.
FILTERED, SORTED = 2.25, 6.0
# Of rules by rejection: copies of [B, N, V] and of [B, I, V] at their largest.
COPIES = {"block": (2, 5), "leviathan": (2, 7), "recursive": (2, 7), "traversal": (3, 4)}


@dataclass(frozen=True)
class ModelSize:
    """config: of the text model, or of a head's layers; dtype: of weights, states, keys and values;
    beside: further numbers alive for each token of a pass: the states of taps inside a target, or
    a head's wide input; handed: numbers of a token's states that a drafter is given.
    """

    config: PreTrainedConfig
    dtype: torch.dtype
    beside: int = 0
    handed: int = 0

    @classmethod
    def of(cls, runner: Runner) -> "ModelSize":
        """The size of the model that a runner runs."""
        hidden = runner.config.hidden_size
        inside = sum(tap != NORM for tap in runner.taps)  # the last state is the pass's own output
        handed = len(runner.taps) * hidden
        return cls(runner.config, runner.dtype, beside=inside * hidden, handed=handed)

    def kv(self, rows: int, slots: int) -> int:
        """Bytes of a pool."""
        return prod(kv_shape(self.config, rows, slots)) * self.dtype.itemsize

    @property
    def taps(self) -> int:
        """Bytes of one token's states that are handed on."""
        return self.handed * self.dtype.itemsize

    @property
    def token(self) -> int:
        """Bytes alive for each token in a forward pass: the residual stream, a layer's input, and
        in the feed-forward four arrays of its width (of the experts used), or as many in attention;
        and what lies beside.
        """
        config = self.config
        *_, kv_heads, width = kv_shape(config, 1, 1)
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        experts = getattr(config, "num_experts_per_tok", None)
        if experts:
            inner = experts * (getattr(config, "moe_intermediate_size", None) or inner)
        heads = (config.num_attention_heads + 2 * kv_heads) * width
        elements = 2 * config.hidden_size + 4 * max(inner, heads) + 2 * width + self.beside
        return int(elements) * self.dtype.itemsize

    def mask(self, rows: int, nodes: int, width: int) -> int:
        """Bytes of a round's additive masks: one for each kind of layer."""
        config = self.config
        kinds = 1 + ("full_attention" in (getattr(config, "layer_types", None) or ()))
        groups = config.num_attention_heads // kv_shape(config, 1, 1)[4]
        one = rows * nodes * width * groups * self.dtype.itemsize
        return one * (kinds if windowed(config) else 1)


@dataclass(frozen=True)
class Work:
    """What is to be decoded. rows: B; prompt, new: the longest prompt and answer, in tokens; tree:
    the largest that may be asked for, None for plain decoding; lossy: whether an extra acceptance
    wants the draft's logits.
    """

    rows: int
    prompt: int
    new: int
    vocab: int
    params: SamplingParams
    tree: Plan | None = None
    rule: str = "coupled"
    lossy: bool = False

    @property
    def slots(self) -> int:
        """Slots a row: its tokens, the pending one, and the tree's."""
        tree = 1 if self.tree is None else max(self.tree.nodes, self.tree.slots)
        return round_up(self.prompt + self.new + 1 + tree)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. target_kv, drafter_kv: the pools; prefill, tree: working memory of a prefill of all
    rows, and of a round; work, target, drafter: what it was computed from; free: what there is.
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
    prefill = _prefill(work, target)
    if drafter is not None and drafter.config.num_hidden_layers:
        # It reads the states that the target's left, of all tokens.
        taps = work.rows * work.prompt * target.taps
        prefill = max(prefill, taps + _prefill(work, drafter))
    return MemoryPlan(
        target_kv=target.kv(work.rows, work.slots),
        drafter_kv=0 if drafter is None else drafter.kv(work.rows, work.slots),
        prefill=prefill,
        tree=_round(work, target, drafter),
        work=work,
        target=target,
        drafter=drafter,
    )


def check(plan: MemoryPlan, free: int | None) -> MemoryPlan:
    """The plan with `free` bytes noted; ValueError, naming what would fit, where it needs more."""
    plan = replace(plan, free=free)
    if free is None or plan.total <= free:
        return plan
    work = plan.work
    offers = []
    if rows := _most(plan, free, "rows", work.rows):
        offers.append(f"batch_size={rows}")
    if new := _most(plan, free, "new", work.new):
        offers.append(f"max_new_tokens={new}")
    if not offers:
        lone = replace(plan, work=replace(work, rows=1, new=1))
        prompt = _most(lone, free, "prompt", work.prompt)
        if prompt:
            offers.append(f"batch_size=1 with prompts of at most {prompt} tokens")
    fits = " or ".join(offers) + " would fit" if offers else "not even one row of one token fits"
    raise ValueError(
        f"memory: got batch_size={work.rows} with rows of {work.prompt + work.new} tokens, which "
        f"need {size(plan.total)} ({plan}), expected at most {size(free)}; {fits}"
    )


def available(device: torch.device) -> int | None:
    """Bytes that new tensors may take; None where that can't be known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    table = Path("/proc/meminfo")
    if device.type != "cpu" or not table.exists():
        return None
    for line in table.read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    return None


def size(count: int) -> str:
    """`1.2 GiB`, or `34 MiB` where that is less than a tenth."""
    return f"{count / GIB:.1f} GiB" if count >= GIB // 10 else f"{count / (1 << 20):.0f} MiB"


def _most(plan_: MemoryPlan, free: int, name: str, limit: int) -> int:
    """The largest `name` below `limit` that fits, 0 if none."""
    low, high = 0, limit - 1
    while low < high:
        middle = (low + high + 1) // 2
        change: dict[str, Any] = {name: middle}
        work = replace(plan_.work, **change)
        if plan(work, plan_.target, plan_.drafter).total <= free:
            low = middle
        else:
            high = middle - 1
    return low


def _copies(params: SamplingParams) -> float:
    """Logits alive while they are transformed, in units of the fp32 ones."""
    if params.greedy:
        return 1.0
    scaled = params.temperature != 1
    if params.top_p < 1:
        return SORTED + scaled
    if params.top_k or params.min_p:
        return FILTERED + scaled
    return 1.0 + scaled


def _prefill(work: Work, model: ModelSize) -> int:
    tokens, row = work.rows * work.prompt, 4 * work.rows * work.vocab
    # A windowed layer's mask is the model's own: boolean, the same for all rows.
    mask = work.prompt**2 if windowed(model.config) else 0
    noise = 0 if work.params.greedy else RACE // 4 * row
    states = tokens * model.config.hidden_size * model.dtype.itemsize
    return max(tokens * model.token + mask, states + max(noise, int(_copies(work.params) * row)))


def _round(work: Work, target: ModelSize, drafter: ModelSize | None) -> int:
    """The largest stage of a round: noise, drafting, the target's forward, its logits, the rule."""
    tree, rule = work.tree, RULES["coupled" if work.params.greedy else work.rule]
    nodes, levels = (1, 0) if tree is None else (tree.nodes, tree.levels)
    row = 4 * work.rows * work.vocab  # bytes of [B, V] in fp32
    shared = 0 if work.params.greedy or not rule.identical else (levels + 1) * row
    stages = [RACE // 4 * shared]
    q_logits = 0
    if tree is not None and drafter is not None:
        drafting, q_logits = _drafting(work, tree, drafter, work.lossy or not rule.identical)
        stages.append(shared + drafting)
    held = shared + q_logits
    mask = target.mask(work.rows, nodes, work.slots)
    stages.append(held + work.rows * nodes * target.token + mask)
    cast = 1 if target.dtype.itemsize >= 4 else 1.5  # the product, and its fp32 copy
    stages.append(held + int(max(cast, _copies(work.params)) * nodes * row))
    chain = tree is None or tree.is_chain
    if rule.identical:
        copies = 1 if work.params.greedy else 2 if chain else 3
        stages.append(held + copies * nodes * row)
    else:
        of_nodes, of_inner = COPIES[work.rule]
        # And one row: the race for the token after the path.
        stages.append(of_nodes * nodes * row + of_inner * q_logits + row)
    return max(stages)


def _drafting(work: Work, tree: Plan, drafter: ModelSize, want_q: bool) -> tuple[int, int]:
    """(bytes at the most while drafting, bytes of the draft logits that the tree then carries)."""
    row, greedy = 4 * work.rows * work.vocab, work.params.greedy
    copies = _copies(work.params)
    if isinstance(tree, StaticTree):
        fed, drafted = max(tree.fed), sum(tree.fed) * row
        children = max(Counter(map(len, tree.paths)).values())
        # Every call's logits are kept until the tree is whole; scores are made from the last ones.
        call = max(copies - 1, 0 if greedy else 1) * fed * row
    else:
        fed, drafted, children = tree.width, 0, tree.width
        # The last call's logits and scores go when the next ones come.
        call = max(copies + 2, 3 if greedy else 4) * fed * row
    law = RULES["coupled" if greedy else work.rule].law
    own = {WITH_REPLACEMENT: children, WITHOUT_REPLACEMENT: fed}.get(law, 0)
    noise = RACE // 4 * own * row
    joined = drafted if want_q else 0
    forward = work.rows * (fed + 1) * drafter.token + drafter.mask(work.rows, fed + 1, work.slots)
    return drafted + max(int(call) + noise, joined, forward), joined
