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

Legend: W ranks.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from draftsmith.decode.engine import memory
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.tree_shapes import parse_tree
from draftsmith.train.objectives.distillation import Distillation
from draftsmith.train.objectives.heldout import DECODER_ROWS
from draftsmith.train.plan.fake_step import Step, rehearse, sweeping_as_on
from draftsmith.train.plan.models import Staged, remade
from draftsmith.train.run.optim import optimizers
from draftsmith.train.run.settings import setting
from draftsmith.train.run.sharding import decoder_layers

# DeepSpeed's defaults, in elements: a bucket of gradients, and what ZeRO-3 keeps gathered.
BUCKET, GATHERED = 500_000_000, 1_000_000_000
STATES = {"AdamW": 2, "Muon": 1, "SGD": 1}  # fp32 numbers a weight


@dataclass(frozen=True)
class Sharding:
    """A way to share out. zero: DeepSpeed's stage, 0 for none."""

    name: str
    zero: int = 0

    @property
    def cuts_weights(self) -> bool:
        return self.name in ("zero3", "fsdp2")


SHARDINGS = [Sharding("ddp"), *(Sharding(f"zero{n}", n) for n in (1, 2, 3)), Sharding("fsdp2")]


@dataclass(frozen=True)
class ModuleSizes:
    """Bytes of what a recipe's modules are, whole; edge, layer: fp32 weights outside the decoder
    layers, and of the largest of these; target_layers: the target's, where they are shared out.
    """

    weights: int
    learned: int  # elements
    optimizer: int
    target: int
    target_layers: list[int]
    spare: int
    edge: int
    layer: int
    low: int  # bytes an element of the type that products run in


@dataclass(frozen=True)
class Held:
    """Bytes of a rank, at its fullest moment."""

    weights: int
    optimizer: int
    gradients: int
    target: int
    step: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.target + self.step


def sizes_of(staged: Staged) -> ModuleSizes:
    """The modules' sizes."""
    config, trained = staged.config, staged.objective
    weights = sum(p.nbytes for p in trained.parameters())
    with staged.fake:
        state = sum(
            4 * STATES[type(optimizer).__name__] * parameter.numel()
            for optimizer in optimizers(trained, config)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if STATES[type(optimizer).__name__] > 1 or group["momentum"]
        )
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in decoder_layers(trained)]
    return ModuleSizes(
        weights=weights,
        learned=sum(p.numel() for p in trained.parameters() if p.requires_grad),
        optimizer=state,
        target=_frozen(staged.target),
        target_layers=_shared_layers(staged),
        spare=staged.spare,
        edge=weights - sum(layers),
        layer=max(layers, default=0),
        low=2 if config.precision == "bf16" else 4,
    )


def rehearsed(staged: Staged, *, checkpointing: bool, low: bool) -> Step:
    """A step of the recipe, of its largest stage; low: with weights in the low type in place of
    autocast, as DeepSpeed has it. The weights stay so, since there is no way back.
    """
    config, objective = staged.config, staged.objective
    logits = config.batch_size * staged.length * staged.vocab
    with staged.fake, sweeping_as_on(staged.device, logits):
        if low and config.precision == "bf16":
            remade(objective, torch.bfloat16)
        if staged.layered is not None:
            _checkpoint(staged.layered, checkpointing)
        objective.train()
        learned = [p for p in objective.parameters() if p.requires_grad]
        autocast = config.precision == "bf16" and not low
        steps = []
        for first in getattr(objective, "stages", [0]):
            if isinstance(objective, Distillation):
                objective.steps_done = torch.tensor(first)  # one that can be read
            steps.append(
                rehearse(
                    lambda: objective(staged.batch()).loss,
                    learned,
                    autocast=autocast,
                    micros=config.accumulation,
                )
            )
    return max(steps, key=lambda step: sum(step.peak(1.0)))


def _checkpoint(model: PreTrainedModel, on: bool) -> None:
    with warnings.catch_warnings():  # of new names, which older versions don't know
        warnings.simplefilter("ignore", FutureWarning)
        if on:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        elif model.is_gradient_checkpointing:
            model.gradient_checkpointing_disable()


def held(staged: Staged, sizes: ModuleSizes, step: Step, way: Sharding, *, world: int) -> Held:
    """What a rank of `world` holds. step: rehearsed with weights in the low type where `way` is of
    ZeRO.
    """
    learned, low = sizes.learned, sizes.low
    # ---- what lasts: weights, optimizer state, frozen models, buffers -------------------------
    weights, cut = sizes.weights, world if way.cuts_weights or way.zero else 1
    around = 0
    share = 1 / world if way.zero >= 2 or way.name == "fsdp2" else 1.0
    if way.name == "ddp" and world > 1:
        around = 4 * learned  # its buckets stay
    if way.zero:
        computed = sizes.weights // 4 * low
        weights = computed // (world if way.zero == 3 else 1) + 4 * learned // world
        around = BUCKET * low * (2 if way.zero == 3 else 1)
    elif way.cuts_weights:
        weights = sizes.weights // world
        around = sizes.edge + 2 * sizes.layer  # the next layer's are fetched meanwhile
    if way.zero == 3:
        around += min(sizes.weights // 4, GATHERED) * low
    target, shared = sizes.target + sizes.spare, sum(sizes.target_layers)
    if shared:
        target -= shared - shared // world - 2 * max(sizes.target_layers)
    lasting = Held(weights, sizes.optimizer // cut, 0, target, 0)
    # ---- what comes and goes: the passes, the optimizer's step, an evaluation -----------------
    other, gradients = step.peak(share)
    updated = int(share * step.gradients)
    fresh = 4 * learned // cut  # fp32 copies of gradients, or the roots that AdamW takes of all
    on_cpu = staged.device == "cpu"
    moments = [
        (around + other, gradients),
        (around + (fresh if way.zero or not on_cpu else 0), updated),
        (around + _decoding(staged), 0),
    ]
    fullest = max(moments, key=sum)
    return Held(lasting.weights, lasting.optimizer, fullest[1], lasting.target, fullest[0])


def _decoding(staged: Staged) -> int:
    """Of the larger of an evaluation's decoding and the draft's answers on policy: keys, values and
    what a round works with.
    """
    config = staged.config
    replay = getattr(config, "replay", None)
    if staged.target is None or (replay and not replay.stream):  # a server decodes
        return 0
    asked, how = replay or config.heldout, replay or config
    new = asked.max_new_tokens
    params = SamplingParams(how.temperature, max_new_tokens=new)
    tree = parse_tree(getattr(config, "tree", "chain"), how.K)
    work = memory.Work(
        rows=getattr(asked, "rows", DECODER_ROWS),
        prompt=max(asked.prompt_tokens, staged.length - new),
        new=new,
        vocab=staged.vocab,
        params=params,
        tree=tree,
    )
    target = memory.ModelSize(staged.target.config.get_text_config(), _type(staged.target))
    draft = None
    if staged.draft is not None:
        draft = memory.ModelSize(staged.draft.config, target.dtype)
    found = memory.plan(work, target, draft).total
    if draft is not None and setting(config, "on_policy.share"):
        new = config.on_policy.max_new_tokens
        prompt = staged.length - new
        own = memory.Work(config.batch_size, prompt, new, staged.vocab, params)
        found = max(found, memory.plan(own, draft, None).total)
    return found


def _type(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _shared_layers(staged: Staged) -> list[int]:
    if staged.target is None or not getattr(staged.config, "shard_target", False):
        return []
    return [_frozen(layer) for layer in decoder_layers(staged.target)]


def _frozen(model: nn.Module | None) -> int:
    parameters = () if model is None else model.parameters()
    return sum(p.nbytes for p in parameters if not p.requires_grad)
