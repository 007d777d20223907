"""What a recipe trains, built from configs alone: the modules on fake tensors, and the story of one
micro-batch as each entry's objective tells it.

Legend: B rows, T positions, N = B * T, V vocabulary.
"""

import contextlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftsmith.models.disk.read_lm import load_config, read_json
from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.heads.hydra import Hydra
from draftsmith.models.heads.medusa import Medusa
from draftsmith.models.taps import Tap, target_states
from draftsmith.models.target import cut_rows, load_target
from draftsmith.models.tokenizer import load_tokenizer, stand_in_tokenizer, vocab_size
from draftsmith.train.drafts.draft_start import fresh_model, open_draft
from draftsmith.train.drafts.eagle_start import open_head
from draftsmith.train.losses.pure import parse_loss
from draftsmith.train.objectives import head_run
from draftsmith.train.objectives.distillation import hidden_and_head
from draftsmith.train.objectives.hydra import HydraObjective
from draftsmith.train.plan.fake_step import chunked_stand_in
from draftsmith.train.run import recipe
from draftsmith.train.run.lora import with_lora
from draftsmith.train.text.batches import Batch

# The class of each training entry's configuration.
SCHEMAS = {
    "distill": "DistillConfig",
    "pretrain": "PretrainConfig",
    "heads": "HeadsConfig",
    "eagle": "EagleRun",
}
# transformers makes no mask for an attention that it doesn't know, which is what it does for rows
# without packing; on fake tensors it can't see that these are, and would make one.
UNMASKED = "unmasked_sdpa"


@dataclass
class Staged:
    """A recipe's cast. story: the summed loss of a micro-batch; trained: the module whose trainable
    parameters the run learns, in fp32; target: None where it isn't on the device; spare: further
    frozen modules in the target's type; vocab: tokens compared; device: cuda or cpu.
    """

    config: Any
    fake: FakeTensorMode
    story: Callable[[], Tensor]
    trained: nn.Module
    target: PreTrainedModel | None
    spare: Sequence[nn.Module]
    vocab: int
    device: str
    checkpoints: bool = True  # whether gradient checkpointing is possible


def staged(argv: list[str], device: str) -> Staged:
    """The cast of the recipe in `argv`, for chunks of the size that `device` (cuda, cpu) takes.

    Raises:
        ValueError: what `recipe.load` refuses, an entry that trains nothing, no config.json where
            the recipe says that a model is, or sizes that don't fit together.
    """
    name = _entry(argv)
    entry = importlib.import_module(f"draftsmith.train.{name}")
    config = recipe.load(getattr(entry, SCHEMAS[name]), argv)
    if config.target.shrink:
        config = getattr(entry, "shrunk", head_run.shrunk)(config)
    config.target = config.target.resolved(config.dtype)
    scene, fake = _Scene(config, device), FakeTensorMode()
    with fake:
        scene.enter()
        return SCENES[name](scene, entry, fake)


def _entry(argv: list[str]) -> str:
    """The entry of the recipe that is named, or of `entry=`."""
    chosen = [arg.removeprefix("recipe=") for arg in argv if arg.startswith("recipe=")]
    given = [arg.removeprefix("entry=") for arg in argv if arg.startswith("entry=")]
    found = recipe.entry_of(chosen[0]) if chosen else (given or [""])[0]
    if found not in SCHEMAS:
        raise ValueError(
            f"plan: got {' '.join(argv)!r} of the entry {found!r}, expected recipe=... of one that "
            f"trains: {', '.join(SCHEMAS)}"
        )
    return found


class _Scene:
    """The target's side, which all entries share."""

    def __init__(self, config: Any, device: str) -> None:
        self.config, self.device = config, device
        self.packed = config.packing and not getattr(config, "on_policy", 0.0)
        self.target: PreTrainedModel | None = None
        self.family: PretrainedConfig | None = None
        self.tokenizer: PreTrainedTokenizerBase = stand_in_tokenizer()
        self.vocab = 0
        spec = config.target
        if not spec.path:
            return
        if spec.shrink:
            tiny, self.tokenizer = load_target(spec, "cpu")
            self.family = tiny.config
        else:
            self.family = read_config("target.path", spec.path)
            with contextlib.suppress(ValueError):  # then all rows of the head count as tokens
                self.tokenizer = load_tokenizer(spec.path, local_files_only=True)
                self.vocab = vocab_size(self.tokenizer)

    def enter(self) -> None:
        """Make the target, on fake tensors."""
        if self.family is None:
            return
        dtype = getattr(torch, self.config.target.dtype)
        if getattr(self.config, "joint", False):
            self.target = model_of(self.family, dtype, self.config)
        else:
            self.target = model_of(self.family, dtype).requires_grad_(False).eval()
        self.vocab = self.vocab or len(self.p_head())
        if not self.packed:
            unmasked(self.target)

    def batch(self) -> Batch:
        rows, length = self.config.batch_size, self.config.max_length
        ids_BT = torch.zeros(rows, length, dtype=torch.int64)
        mask = torch.ones(rows, 1, length, length, dtype=torch.bool) if self.packed else None
        positions_BT = torch.arange(length).expand(rows, length)
        return Batch(ids_BT, positions_BT, ids_BT == 0, mask, ())

    def states(self, batch: Batch, taps: tuple[Tap, ...] = ()) -> tuple[Tensor, Tensor]:
        """The target's last states [N, G], and those of taps [B, T, F], from a pass or a cache."""
        assert self.target is not None
        if getattr(self.config, "cache", ""):
            hidden = self.target.config.get_text_config().hidden_size
            shape = (*batch.input_ids.shape, (1 + len(taps)) * hidden)
            seen_BTF = torch.empty(shape, dtype=self.target.dtype)
            return seen_BTF[..., :hidden].flatten(0, 1), seen_BTF[..., hidden:]
        seen = target_states(
            self.target,
            taps,
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
        )
        return seen.norm_BTG.flatten(0, 1), seen.taps_BTF

    def p_head(self) -> Tensor:
        assert self.target is not None
        head_VG: Tensor = self.target.get_output_embeddings().weight
        return cut_rows(head_VG, self.vocab or len(head_VG))


def _distill(scene: _Scene, entry: Any, fake: FakeTensorMode) -> Staged:
    config, target = scene.config, scene.target
    assert target is not None
    if config.draft:
        draft = _given("draft", config.draft, lora=config)
    else:
        draft = open_draft(config, target, scene.tokenizer, config.seed)
    reference = _given("reference", config.reference, target.dtype) if config.reference else None
    for model in [draft, *([] if reference is None else [reference])]:
        if not scene.packed:
            unmasked(model)
    parts = [parse_loss(text) for text in (config.loss, config.second_loss) if text]
    of_target = bool(config.select or config.by_depth or any(p.keys() != {"ce"} for p in parts))
    warped = config.temperature not in (0.0, 1.0)
    cut = config.top_k or config.min_p or config.top_p < 1
    many = max(len(p.keys() - {"ce"}) for p in parts) > 1
    tiles = 3 * warped + 6 * bool(cut) + 3 * many

    def story() -> Tensor:
        batch = scene.batch()
        states_NG = None
        if of_target:
            with torch.no_grad():
                states_NG, _ = scene.states(batch)
        hidden_NH, head_VH = hidden_and_head(draft, batch)
        head_VH = cut_rows(head_VH, scene.vocab)
        if reference is not None:
            with torch.no_grad():
                hidden_and_head(reference, batch)
        total = torch.zeros(())
        for ce in {name == "ce" for p in parts for name in p}:
            p = (None, None) if ce or states_NG is None else (states_NG, scene.p_head())
            how: Any = {"device": scene.device, "tiles": 0 if ce else tiles}
            total = total + chunked_stand_in([hidden_NH], head_VH, *p, **how)
        return total

    spare = [draft] if reference is None else [draft, reference]
    return Staged(config, fake, story, draft, target, spare, scene.vocab, scene.device)


def _pretrain(scene: _Scene, entry: Any, fake: FakeTensorMode) -> Staged:
    config = scene.config
    if config.model:
        model = _given("model", config.model, lora=config)
    else:
        family = LlamaConfig() if scene.target is None else scene.target.config
        rows = config.tokenizer_size
        if scene.target is not None:
            rows = len(scene.target.get_output_embeddings().weight)
        model = fresh_model(config, family, scene.tokenizer, rows=rows, seed=config.seed)
        model = with_lora(model, config, given=False, seed=config.seed)
    if not scene.packed:
        unmasked(model)

    def story() -> Tensor:
        hidden_NH, head_VH = hidden_and_head(model, scene.batch())
        return chunked_stand_in([hidden_NH], head_VH, None, None, device=scene.device)

    # The target, if there is one, stays on the CPU.
    return Staged(config, fake, story, model, None, [], scene.vocab, scene.device)


def _heads(scene: _Scene, entry: Any, fake: FakeTensorMode) -> Staged:
    config, target = scene.config, scene.target
    assert target is not None
    head: Medusa | Hydra = entry.make_head(config, target)
    trained: nn.Module = head
    if config.joint:
        trained = nn.ModuleList([head, target])

    def story() -> Tensor:
        batch, total = scene.batch(), torch.zeros(())
        with torch.no_grad():
            states_NG, _ = scene.states(batch)
        read_NG = states_NG
        if config.joint:
            read_NG, head_VG = hidden_and_head(target, batch)
            base = (states_NG, scene.p_head())
            total = chunked_stand_in([read_NG], head_VG, *base, device=scene.device)
        own = next(head.parameters()).dtype
        norm_BTH = read_NG.unflatten(0, batch.input_ids.shape).to(own)
        if isinstance(head, Hydra):
            reads: Any = SimpleNamespace(head=head, noise=0.0, training=True)
            drafted = HydraObjective.drafted(reads, batch, norm_BTH)
        else:
            drafted = head.states(norm_BTH)
        for depth, hidden_BTH in enumerate(drafted):
            head_VH = cut_rows(head.head_VH(depth), scene.vocab)
            p = (None, None) if config.loss == "ce" else (states_NG, scene.p_head())
            hidden_NH = hidden_BTH.flatten(0, 1)
            total = total + chunked_stand_in([hidden_NH], head_VH, *p, device=scene.device)
        return total

    spare = [head]
    cast = (fake, story, trained, target, spare, scene.vocab, scene.device)
    return Staged(config, *cast, checkpoints=config.joint)


def _eagle(scene: _Scene, entry: Any, fake: FakeTensorMode) -> Staged:
    config, target = scene.config, scene.target
    assert target is not None
    if config.draft:
        head = Eagle.from_json(_json("draft", config.draft)).bind(target)
    else:
        counts_V = torch.zeros(len(target.get_output_embeddings().weight), dtype=torch.int64)
        head = open_head(config, target, scene.tokenizer, counts_V, config.seed)
    rows = min(scene.vocab, len(head.head_DH))
    steps = config.unroll if config.version == 3 else 1

    def story() -> Tensor:
        batch = scene.batch()
        states_NG, taps_BTF = scene.states(batch, head.taps)
        hidden_BTH = head.fuse(taps_BTF.to(head.fc.weight.dtype))
        unrolled = head.unroll(
            hidden_BTH, batch.input_ids, batch.position_ids, batch.attention_mask, steps=steps
        )
        hidden_SNH = [state_BTH.flatten(0, 1) for state_BTH in unrolled]
        p_head_DG = torch.empty(rows, states_NG.shape[1], dtype=states_NG.dtype)
        q_head_DH = cut_rows(head.head_DH, rows)
        total = chunked_stand_in(hidden_SNH, q_head_DH, states_NG, p_head_DG, device=scene.device)
        if config.version == 1:
            seen_NG = states_NG.float()
            total = total + nn.functional.smooth_l1_loss(hidden_SNH[0].roll(1, 0).float(), seen_NG)
        return total

    spare = [head]
    cast = (fake, story, head, target, spare, scene.vocab, scene.device)
    return Staged(config, *cast, checkpoints=False)


def model_of(config: PretrainedConfig, dtype: torch.dtype, lora: Any = None) -> PreTrainedModel:
    """A causal LM of a config, on fake tensors; lora: a recipe that may ask for adapters."""
    # peft moves its layers, which fake tensors don't allow: so first on none at all.
    with unset_fake_temporarily(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        if lora is not None:
            model = with_lora(model, lora, given=True, seed=0)
    remade(model, None)
    return model


def remade(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Put new fake tensors in the place of a module's; its parameters in `dtype`, if one is given.

    Converting those that are there isn't safe: `.data` of a fake tensor can't be set.
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


def unmasked(model: Any) -> None:
    """Let the model attend causally without a mask, as it does on rows that aren't packed."""
    AttentionInterface.register(UNMASKED, sdpa_attention_forward)
    model.set_attn_implementation(UNMASKED)


def read_config(field: str, path: str) -> PretrainedConfig:
    """The config of the model at `path`; ValueError, saying which file is needed, without one."""
    try:
        return load_config(path, local_files_only=True)
    except ValueError as error:
        raise _needed(field, path) from error


def _json(field: str, path: str) -> dict[str, Any]:
    if not (Path(path) / "config.json").is_file():
        raise _needed(field, path)
    return read_json(Path(path) / "config.json")


def _needed(field: str, path: str) -> ValueError:
    other = "try target.shrink=true" if field == "target.path" else "leave it out for sizes"
    return ValueError(
        f"{field}: got {path}, expected {Path(path) / 'config.json'} on this machine (weights "
        f"aren't needed to plan); put that one file there, correct the path, or {other}"
    )


def _given(
    field: str, path: str, dtype: torch.dtype = torch.float32, lora: Any = None
) -> PreTrainedModel:
    return model_of(read_config(field, path), dtype, lora)


SCENES: dict[str, Callable[[_Scene, Any, FakeTensorMode], Staged]] = {
    "distill": _distill,
    "pretrain": _pretrain,
    "heads": _heads,
    "eagle": _eagle,
}
