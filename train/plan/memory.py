"""What a rank holds under each way to share a run out, from a rehearsed step.

    weights     the trained module's: fp32, and under ZeRO a copy to compute with in the low type
    optimizer   its state, by what the run's own optimizers keep
    gradients   at the step's fullest moment
    target      its weights, with shard_target a share of its layers and two that are gathered; and
                frozen copies in its type: of the draft to decode with, a reference
    step        activations, the target's pass, the chunked loss, and what sharding gathers

Where it isn't exact: rows count as full and all their tokens as trained; kernels' own workspaces
and the allocator's waste aren't counted (`plan.SPARE` is for these). Of DeepSpeed, buckets are
counted as it makes them by default.
"""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.decode.engine import memory
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.tree_shapes import parse_tree
from draftsmith.models.target import output_head
from draftsmith.train.plan.fake_step import GRADIENTS, Step, rehearse, sweeping_as_on
from draftsmith.train.plan.models import Staged, remade
from draftsmith.train.run.optim import optimizers
from draftsmith.train.run.settings import setting
from draftsmith.train.run.sharding import decoder_layers

# DeepSpeed's defaults, in elements: a bucket of gradients, and what ZeRO-3 keeps gathered.
BUCKET, GATHERED = 500_000_000, 1_000_000_000
EVALUATION = "an evaluation"
SHARDINGS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")  # ways to share out
STATES = {"AdamW": 2, "Muon": 1, "Muon32": 1, "SGD": 1}  # fp32 numbers a weight


class ModuleSizes(NamedTuple):
    """Bytes of what a recipe's modules are, whole; edge, layer: fp32 weights outside the decoder
    layers, and of the largest of these.
    """

    weights: int
    learned: int  # elements
    optimizer: int
    target: int
    edge: int
    layer: int


class Held(NamedTuple):
    """Bytes of a rank, at its fullest moment; parts: of `step`; when: what it does then."""

    weights: int
    optimizer: int
    gradients: int
    target: int
    step: int
    parts: dict[str, int]
    when: str

    @property
    def columns(self) -> dict[str, int]:
        """What is held together, by name."""
        return dict(zip(self._fields[:5], self[:5], strict=True))

    @property
    def total(self) -> int:
        return sum(self.columns.values())


def sizes_of(staged: Staged) -> ModuleSizes:
    trained, state = staged.objective, 0
    weights = sum(p.nbytes for p in trained.parameters())
    with staged.fake:
        for optimizer in optimizers(trained, staged.config):
            numbers = STATES[type(optimizer).__name__]
            for group in optimizer.param_groups:
                if numbers > 1 or group["momentum"]:
                    state += 4 * numbers * sum(p.numel() for p in group["params"])
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in decoder_layers(trained)]
    learned = sum(p.numel() for p in trained.parameters() if p.requires_grad)
    target = staged.bytes_of(staged.target) if staged.target else 0
    edge, largest = weights - sum(layers), max(layers, default=0)
    return ModuleSizes(weights, learned, state, target, edge, largest)


def rehearsed(staged: Staged, *, checkpointing: bool, low: bool) -> Step:
    """A step of the recipe, of its largest stage; low: with weights in the low type in place of
    autocast, as DeepSpeed has it. The weights stay so, since there is no way back.
    """
    config, objective = staged.config, staged.objective
    bf16 = config.dtype == "bfloat16"
    autocast = bf16 and not low

    def loss() -> Tensor:
        return objective(staged.batch()).loss

    body = output_head(staged.target)[0] if staged.target else None
    logits = config.batch_size * staged.length * staged.vocab
    # transformers' new names of checkpointing, of which it warns, aren't in its older versions.
    quiet = warnings.catch_warnings(action="ignore", category=FutureWarning)
    with quiet, staged.fake, sweeping_as_on(staged.device, logits):
        if low and bf16:
            remade(objective, torch.bfloat16)
        if staged.layered is not None and checkpointing:
            staged.layered.gradient_checkpointing_enable({"use_reentrant": False})
        elif staged.layered is not None and staged.layered.is_gradient_checkpointing:
            staged.layered.gradient_checkpointing_disable()
        objective.train()
        learned = [p for p in objective.parameters() if p.requires_grad]
        steps = []
        for first in getattr(objective, "stages", [0]):
            if hasattr(objective, "stages"):
                objective.steps_done = torch.tensor(first)  # one that can be read
            how = {"autocast": autocast, "micros": config.accumulation}
            steps.append(rehearse(loss, learned, body, **how))
    return max(steps, key=lambda step: step.peak(1.0).size(1.0))


def held(staged: Staged, sizes: ModuleSizes, step: Step, way: str, *, world: int) -> Held:
    """What a rank of `world` holds. step: rehearsed with low weights where `way` is of ZeRO."""
    zero = int(way[-1]) if way.startswith("zero") else 0  # DeepSpeed's stage
    learned, low = sizes.learned, 2 if staged.config.dtype == "bfloat16" else 4
    # ---- what lasts: weights, optimizer state, frozen models, buffers -------------------------
    weights, around, cut = sizes.weights, 0, 1 if way == "ddp" else world
    share = 1 / world if zero >= 2 or way == "fsdp2" else 1.0
    if way == "ddp" and world > 1:
        around = 4 * learned  # its buckets stay
    if zero:
        weights = weights // 4 * low // (world if zero == 3 else 1) + 4 * learned // world
        around = BUCKET * low * (2 if zero == 3 else 1)
    elif way == "fsdp2":
        weights //= world
        around = sizes.edge + 2 * sizes.layer  # the next layer's are fetched meanwhile
    if zero == 3:
        around += min(sizes.weights // 4, GATHERED) * low
    shared, resting = staged.target if setting(staged.config, "shard_target") else None, 0
    layers = [_frozen(layer) for layer in decoder_layers(shared)] if shared else []
    target = sizes.target + staged.spare
    if layers:
        target -= sum(layers) - sum(layers) // world - 2 * max(layers)
    if staged.target and setting(staged.config, "cache.offload_target"):
        resting = sum(map(staged.bytes_of, decoder_layers(staged.target)))
    # ---- what comes and goes: the passes, the optimizer's step, an evaluation -----------------
    fresh = 4 * learned // cut  # fp32 copies of gradients, or the roots that AdamW takes of all
    fresh *= zero > 0 or staged.device != "cpu"
    passes = step.peak(share).parts
    last = int(share * step.at[-1].gradients)
    moments = [
        ("a step's passes", {**passes, GRADIENTS: int(share * passes.get(GRADIENTS, 0))}, resting),
        ("an optimizer's step", {GRADIENTS: last, "its own": fresh}, resting),
        (EVALUATION, {"keys, values, a round": _decoding(staged)}, 0),
    ]
    found = []
    for when, parts, away in moments:
        parts = {**parts, "buckets, gathers": around}
        gradients = parts.pop(GRADIENTS, 0)
        own = (weights, sizes.optimizer // cut, gradients, target - away, sum(parts.values()))
        found.append(Held(*own, parts, when))
    return max(found, key=lambda held: held.total)


def _decoding(staged: Staged) -> int:
    """Keys, values and a round's work: of an evaluation, or the draft's answers on policy."""
    config = staged.config
    replay = getattr(config, "replay", None)
    if staged.target is None or (replay and not replay.stream):  # a server decodes
        return 0
    asked, how = replay or config.heldout, replay or config
    new, vocab = asked.max_new_tokens, staged.vocab
    rows, prompt = asked.batch_size, max(asked.prompt_tokens, staged.length - new)
    params = SamplingParams(how.temperature, max_new_tokens=new)
    tree = parse_tree(getattr(config, "tree", "chain"), how.K)
    work = memory.Work(rows, prompt, new, vocab, params, tree)
    dtype = next(staged.target.parameters()).dtype
    target = memory.ModelSize(staged.target.config.get_text_config(), dtype)
    if staged.draft is None:
        return memory.plan(work, target, None).total
    draft = memory.ModelSize(staged.draft.config, dtype)
    found = memory.plan(work, target, draft).total
    if setting(config, "on_policy.share"):
        new = config.on_policy.max_new_tokens
        own = memory.Work(config.batch_size, staged.length - new, new, vocab, params)
        found = max(found, memory.plan(own, draft, None).total)
    return found


def _frozen(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters() if not p.requires_grad)
