"""What a recipe trains, built from configs alone: the models and the objective of its entry, by the
entry's own functions, on fake tensors; and a full micro-batch.

Legend: B rows, T positions, N = B * T, G hidden size of the target, J listed tokens of a row.
"""

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftsmith.decode.drafters.load import composed
from draftsmith.models.disk.read_lm import load_config, read_json
from draftsmith.models.draft_lm import set_mask
from draftsmith.models.heads.block import Block
from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.heads.head import family, heads
from draftsmith.models.taps import Tap, TargetStates
from draftsmith.models.target import load_target, quantised_maps, rounded_bytes
from draftsmith.models.tokenizer import load_tokenizer, numbered, vocab_size
from draftsmith.train.drafts.blocks import open_block
from draftsmith.train.drafts.start import TINY, open_draft, open_head, tiny_draft
from draftsmith.train.live.batches import ServedBatch
from draftsmith.train.live.learner import make_objective
from draftsmith.train.losses.top_k import TopKRows
from draftsmith.train.objectives.block import BlockObjective
from draftsmith.train.plan.fake_step import WithoutData
from draftsmith.train.run import recipe
from draftsmith.train.run.frozen_target import check_frozen
from draftsmith.train.run.loop import Objective
from draftsmith.train.run.lora import Lora, with_lora
from draftsmith.train.run.settings import setting
from draftsmith.train.scoring.objective import ScorerObjective
from draftsmith.train.scoring.rows import RowBatch, ScorerRows
from draftsmith.train.teachers.states import OnlineTaps, States
from draftsmith.train.teachers.teachers import StateTeacher, Teacher, TopKTeacher
from draftsmith.train.text.batches import Batch

# transformers makes no mask for an attention that it doesn't know, which is what it does for rows
# without packing; on fake tensors it can't see that these are, and would make one.
UNMASKED = "unmasked_sdpa"


class Staged:
    """A recipe's cast, which its entry's part of `ENTRIES` completes.

    objective: what the run trains, in fp32; batch: makes a full micro-batch; target: None where it
    isn't on the device; draft: a draft LM that decodes; layered: whose layers can be checkpointed;
    spare: bytes of further models; vocab: tokens of the target; device: cuda or cpu.
    """

    objective: Objective
    target: PreTrainedModel | None = None
    draft: PreTrainedModel | None = None
    layered: PreTrainedModel | None = None
    spare = vocab = 0

    def __init__(self, config: Any, device: str) -> None:
        self.config, self.device, self.fake = config, device, FakeTensorMode()
        self.batch: Callable[[], Any] = self.text
        self.written = setting(config, "on_policy.share")  # by the draft, this share of the text
        self.packed = setting(config, "text.packing") and not self.written
        lengths = [setting(config, f"{group}.max_length") for group in ("text", "mix")]
        self.length: int = next(filter(None, lengths), 0)  # tokens of a row

    def open_target(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The target, and its tokenizer or, without one at hand, one of as many tokens."""
        spec = self.config.target
        if spec.shrink:
            with unset_fake_temporarily():
                tiny, tokenizer = load_target(spec, "cpu")
            family = tiny.config
        else:
            family = read_config("target.path", spec.path)
            tokenizer = numbered(family.get_text_config().vocab_size)
            with contextlib.suppress(ValueError):
                tokenizer = load_tokenizer(spec.path, local_files_only=True)
        self.vocab = vocab_size(tokenizer)
        check_frozen(self.config)
        joint = setting(self.config, "joint.enabled")
        target = model_of(family, getattr(torch, spec.dtype), self.config.lora if joint else None)
        self.target = self.masked(target if joint else target.requires_grad_(False).eval())
        return self.target, tokenizer

    def bytes_of(self, part: nn.Module) -> int:
        """Frozen weights of the target, or of a part of it, quantised as the recipe says."""
        found = sum(p.nbytes for p in part.parameters() if not p.requires_grad)
        if self.target is not None and (kind := self.config.target.quantise):
            rounded = {*quantised_maps(self.target)} & {*part.modules()}
            found -= sum(one.weight.nbytes - rounded_bytes(one, kind) for one in rounded)
        return found

    def masked(self, model: Any) -> Any:
        """The model, with the masks that the run's batches ask for."""
        if not self.packed:
            AttentionInterface.register(UNMASKED, sdpa_attention_forward)
            model.set_attn_implementation(UNMASKED)
        return model

    def given(self, field: str, dtype: torch.dtype = torch.float32, lora: Any = None) -> Any:
        """The causal LM that a field of the recipe names."""
        path = composed(setting(self.config, field))[1]
        return self.masked(model_of(read_config(field, path), dtype, lora))

    def also(self, model: nn.Module, *types: torch.dtype) -> None:
        """Further copies of a model are on the device, in these types."""
        numbers = sum(parameter.numel() for parameter in model.parameters())
        self.spare += numbers * sum(dtype.itemsize for dtype in types)

    # ---- the target's side of a micro-batch ---------------------------------------------------
    def text(self) -> Batch:
        rows, length = self.config.batch_size, self.length
        ids_BT = torch.zeros(rows, length, dtype=torch.int64)
        mask = torch.ones(rows, 1, length, length, dtype=torch.bool) if self.packed else None
        positions_BT = torch.arange(length).expand(rows, length)
        # What the draft wrote is in no cache.
        kept = setting(self.config, "cache.path") and not self.written
        return Batch(ids_BT, positions_BT, ids_BT == 0, mask, (), ids_BT if kept else None)

    def kept_states(self, batch: Batch, taps: tuple[Tap, ...]) -> TargetStates:
        assert self.target is not None
        hidden = self.target.config.get_text_config().hidden_size
        shape = (*batch.input_ids.shape, (1 + len(taps)) * hidden)
        states_BTU = torch.empty(shape, dtype=self.target.dtype)
        return TargetStates(states_BTU[..., :hidden], states_BTU[..., hidden:])

    def states(self, target: PreTrainedModel, taps: tuple[Tap, ...]) -> States:
        """Of a pass, or of the recipe's cache."""
        if not self.config.cache.path:
            return OnlineTaps(target, taps)
        return lambda batch: self.kept_states(batch, taps)


def listed(like: Tensor, count: int) -> TopKRows:
    ids_NJ = torch.zeros(like.numel(), count, dtype=torch.int64)
    return TopKRows(ids_NJ, torch.zeros(like.numel(), count + 1))


def staged(argv: list[str], device: str) -> Staged:
    """The cast of the recipe in `argv`, for chunks of the size that `device` (cuda, cpu) takes.
    ValueError: what `recipe.load` and the entry refuse, an entry that trains nothing, no
    config.json where the recipe says that a model is, or sizes that don't fit together.
    """
    said = dict(argument.split("=", 1) for argument in argv if "=" in argument)
    name = recipe.entry_of(said["recipe"]) if "recipe" in said else said.get("entry", "")
    if name not in ENTRIES:
        raise ValueError(
            f"plan: got {' '.join(argv)!r} of the entry {name!r}, expected recipe=... of one that "
            f"trains: {', '.join(ENTRIES)}"
        )
    entry = importlib.import_module(f"draftsmith.train.{name}")
    schema, complete = ENTRIES[name]
    config = recipe.load(getattr(entry, schema), argv)
    automatic = config.automatic
    if config.target.shrink:
        config = entry.shrunk(config)
    if automatic and device == "cuda" and not torch.cuda.is_available():
        config.dtype = "bfloat16"  # as it will be where it runs
    config.target = config.target.resolved(config.dtype)
    cast = Staged(config, device)
    with cast.fake, WithoutData():
        complete(cast, entry)
    return cast


def _distill(cast: Staged, entry: Any) -> None:
    config, (target, tokenizer) = cast.config, cast.open_target()
    if config.draft.path:
        draft = cast.given("draft.path", lora=config.lora)
    else:
        begins = (config.draft, config.lora, False, target, tokenizer, config.seed)
        draft = cast.masked(open_draft(*begins))
    if config.pard.levels:
        set_mask(draft.config, 0, config.pard.levels)  # whichever it is
    cast.also(draft, target.dtype)
    reference = None
    if config.tokens.reference:
        reference = cast.given("tokens.reference", target.dtype).requires_grad_(False)
        cast.also(reference, target.dtype)
    cast.draft = cast.layered = draft
    teacher: Teacher = StateTeacher(target, cast.vocab, cast.states(target, ()))
    if count := config.cache.top_k:
        itself = StateTeacher(target, cast.vocab)
        teacher = TopKTeacher(lambda places_N, _: listed(places_N, count), itself)
    cast.objective = entry.make_objective(config, draft, teacher, tokenizer, reference)


def _pretrain(cast: Staged, entry: Any) -> None:
    config, target = cast.config, None
    tokenizer: PreTrainedTokenizerBase = numbered(config.tokenizer_size)
    if config.target.path:
        target, tokenizer = cast.open_target()
    if config.model.path:
        model = cast.given("model.path", lora=config.lora)
    else:
        model = cast.masked(entry.make_model(config, tokenizer, target))
    cast.objective = entry.make_objective(config, model, target, tokenizer)
    cast.draft = cast.layered = model
    if target is None or not config.heldout.limit:
        cast.target = None  # it stays on the CPU
    else:
        cast.also(model, target.dtype)


def _heads(cast: Staged, entry: Any) -> None:
    config, (target, tokenizer) = cast.config, cast.open_target()
    head = entry.make_head(config, target)
    states = cast.states(target, head.taps)
    cast.objective = entry.make_objective(config, head, target, tokenizer, states)
    cast.layered = target if config.joint.enabled else None
    cast.also(head, target.dtype)


def _eagle(cast: Staged, entry: Any) -> None:
    config, (target, tokenizer) = cast.config, cast.open_target()
    source = config.head
    if source.kind == "mtp":  # an earlier one has its target's sizes, and may be in its folder
        source = replace(source, path="")
    if source.path:
        made_by = heads()[source.makes]
        head: Any = made_by.from_json(read_config("head.path", source.path, head=True)).bind(target)
    else:
        counts_V = torch.zeros(len(target.get_output_embeddings().weight), dtype=torch.int64)
        head = open_head(source, target, tokenizer, counts_V, config.seed)
    given = (head, target, tokenizer, cast.states(target, head.taps))
    objective_of = family(head.kind, "train.objectives", "Objective")
    cast.objective = made = objective_of(config.unroll, *given, loss=config.loss)
    cast.also(head, target.dtype)
    if not head.vocab.is_full:  # the target's rows of the tokens that it drafts
        cast.spare += made._p_heads[0].nbytes


def _blocks(cast: Staged, entry: Any) -> None:
    config, (target, tokenizer) = cast.config, cast.open_target()
    if config.head.path:
        head = Block.from_json(read_config("head.path", config.head.path, head=True)).bind(target)
    else:
        head = open_block(config.head, target, tokenizer, config.seed)
    given = (head, target, tokenizer, cast.states(target, head.taps))
    cast.objective = BlockObjective(config.anchors, *given, loss=config.loss)
    cast.also(head, target.dtype)


def _online(cast: Staged, entry: Any) -> None:
    config, (target, tokenizer) = cast.config, cast.open_target()
    draft: Any
    if config.target.shrink:
        draft = tiny_draft(config.kind, target, tokenizer)
    elif config.kind == "lm":
        draft = cast.given("drafter")
    else:
        draft = Eagle.from_json(read_config("drafter", config.drafter, head=True))
    cast.objective = make_objective(config.lessons, draft, target, tokenizer)
    if config.kind == "lm":
        cast.draft = cast.layered = cast.masked(draft)

    def batch() -> ServedBatch:
        text = cast.text()
        if config.kind != "lm":
            return ServedBatch(**vars(text), states=cast.kept_states(text, draft.taps))
        return ServedBatch(**vars(text), listed=listed(text.input_ids, config.replay.keep_top_k))

    cast.batch = batch
    # The version that serves, to compare with; of a replay, all that are compared, and one decodes.
    compared = 2 + bool(config.replay.ceiling) if config.replay.stream else 1
    cast.also(draft, *[torch.float32] * compared, *[target.dtype] * bool(config.replay.stream))


def _tune(cast: Staged, entry: Any) -> None:
    config, (copied, tokenizer) = cast.config, cast.open_target()  # the copy that decodes
    model = model_of(copied.config, torch.float32, config.lora)
    if config.method == "prompts":
        model = entry.with_prompts(model, config.prompts, vocab_size(tokenizer))
    model = cast.masked(model)
    cast.objective = entry.make_objective(config, model, tokenizer)
    cast.layered = model


def _scorers(cast: Staged, entry: Any) -> None:
    config = cast.config
    if config.reading.kind == "judge":
        target, _ = cast.open_target()
        hidden, cast.target = target.config.get_text_config().hidden_size, None
    elif config.target.shrink:
        hidden = TINY.hidden
    else:
        hidden = read_config("reading.drafter", config.reading.drafter, head=True)["hidden_size"]
    rows, numbers = config.batch_size, len(config.reading.scalars)
    with unset_fake_temporarily():
        two_N, two_NS = torch.arange(2), torch.zeros(2, numbers)
        fitted = ScorerRows(torch.zeros(2, hidden), two_N, two_NS, two_N.float(), two_N > 0, two_N)
        with torch.device("meta"):
            scorer = entry.make_scorer(config, hidden)
        cast.objective = ScorerObjective(scorer, fitted, config.reject_weight)
    remade(cast.objective, None)
    cast.batch = lambda: RowBatch(torch.empty(rows, hidden + numbers), torch.empty(rows), ())


def model_of(config: PretrainedConfig, dtype: torch.dtype, lora: Lora | None) -> PreTrainedModel:
    """A causal LM of a config, on fake tensors; lora: what adapters it gets."""
    # peft moves its layers, which fake tensors don't allow: so first on none at all.
    with unset_fake_temporarily(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        if lora is not None:
            model = with_lora(model, lora, given=True, seed=0)
    remade(model, None)
    return model


def remade(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Put new fake tensors in the place of a module's; its parameters in `dtype`, if one is given.
    (`.data` of a fake tensor can't be set.)
    """
    made: dict[int, Tensor] = {}  # ties stay ties
    for part in module.modules():
        held: list[dict[str, Any]] = [part._parameters, part._buffers]
        for tensors in held:
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    learns = isinstance(tensor, nn.Parameter)
                    kept = tensor.dtype if dtype is None or not learns else dtype
                    new = torch.empty(tensor.shape, dtype=kept)
                    made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if learns else new
                tensors[name] = made[id(tensor)]


def read_config(field: str, path: str, *, head: bool = False) -> Any:
    """The config of the model at `path`, or of a head the object in its config.json; ValueError,
    saying which file is needed, without one.
    """
    file = Path(path) / "config.json"
    if head and file.is_file():
        return read_json(file)
    with contextlib.suppress(ValueError):
        if not head:
            return load_config(path)  # of a hub name this one file is fetched
    other = "try target.shrink=true" if field == "target.path" else "leave it out for sizes"
    raise ValueError(
        f"{field}: got {path}, expected {file} on this machine, or a name of the hub, whose "
        "config.json is fetched (weights aren't needed to plan); put that one file there, correct "
        f"the path, or {other}"
    )


# Of each training entry: the class of its configuration, and what completes its cast.
ENTRIES: dict[str, tuple[str, Callable[[Staged, Any], None]]] = {
    "distill": ("DistillConfig", _distill),
    "pretrain": ("PretrainConfig", _pretrain),
    "heads": ("HeadsConfig", _heads),
    "eagle": ("EagleRun", _eagle),
    "blocks": ("BlocksRun", _blocks),
    "tune": ("TuneConfig", _tune),
    "online": ("OnlineRun", _online),
    "scorers": ("ScorersConfig", _scorers),
}
