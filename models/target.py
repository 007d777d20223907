"""Targets: any causal LM that transformers reads, frozen; its body and its output head apart.

Legend: B rows, T positions, H hidden, V rows of the output head.
"""

import warnings
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.disk.read_lm import check_dtype, load_config, load_lm
from draftsmith.models.draft_lm import draft_from_config
from draftsmith.models.tokenizer import (
    check_logit_width,
    load_tokenizer,
    stand_in_tokenizer,
    vocab_size,
)


@dataclass
class TargetSpec:
    """Which target, as a recipe says it (`target.path=... target.shrink=true`)."""

    path: str  # a folder in transformers' layout, or a hub name
    dtype: str = "auto"  # "auto" (as saved), "float32" or "bfloat16"
    # A tiny random model of the same family: tries a recipe without its weights.
    shrink: bool = False
    adapter: str | None = None  # a folder with a PEFT adapter, merged into the weights
    quantise: str = ""  # int8 | int4: the maps of its layers, by torchao; empty: as they are
    parallel: int = 1  # processes, a GPU each, that have a part of its layers; while decoding

    def __post_init__(self) -> None:
        if self.parallel < 1:
            raise ValueError(f"parallel: got {self.parallel}, expected at least 1 process")
        if self.quantise not in ("", "int8", "int4"):
            raise ValueError(f"target.quantise: got {self.quantise!r}, expected int8 or int4")

    def resolved(self, dtype: str) -> "TargetSpec":
        """The same with `dtype` where it says "auto"."""
        return replace(self, dtype=dtype) if self.dtype == "auto" else self


def load_target(
    spec: TargetSpec, device: str | torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target, frozen, in eval mode, with sdpa attention, on `device`; and its tokenizer. With
    `spec.shrink` nothing is downloaded and no weights are read.

    ValueError for no such device, nothing at the path, damaged or incomplete weights, an unknown
    dtype, no tokenizer, an output head narrower than the tokenizer, or another model's adapter.
    """
    place = device_of(device)
    if spec.parallel > 1:
        raise ValueError(
            f"parallel: got {spec.parallel} where a target isn't decoded with, expected 1; it is "
            "for evaluate and serve"
        )
    if spec.shrink:
        model, tokenizer = _shrunk(spec)
    else:
        model = load_lm(spec.path, dtype=spec.dtype, allow_unknown=True)
        tokenizer = load_tokenizer(spec.path)
    if spec.adapter is not None:
        model = with_adapter(model, spec.adapter)
    head = model.get_output_embeddings()
    if head is not None:
        check_logit_width(head.weight.shape[0], tokenizer, f"the target {spec.path}")
    model.requires_grad_(False)
    if spec.quantise:
        quantise(model, spec.quantise)
    return model.eval().to(place), tokenizer


def device_of(name: str | torch.device) -> torch.device:
    """The device of this name; of "auto" a GPU, where there is one. ValueError, naming those at
    hand, for one that isn't there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        there = (device.index or 0) < torch.get_device_module(device).device_count()
    except RuntimeError:  # no such kind, or none that computes
        there = False
    if not there:
        found = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
        raise ValueError(f"device: got {str(name)!r}, expected one that this machine has: {found}")
    return device


def native_bf16(kind: str) -> bool:
    """Whether devices of this kind, "cuda" or "cpu", multiply in bf16 here: a processor does by
    AVX-512 or AMX. Without that it takes 3 to 30 times as long as in fp32.
    """
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(False)
    onednn = torch.backends.mkldnn.is_available()
    return onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def output_head(model: PreTrainedModel) -> tuple[nn.Module, torch.Tensor, torch.Tensor | None]:
    """A causal LM as (body, head_VH, bias_V): its logits are body(input_ids).last_hidden_state @
    head_VH.T + bias_V; most have no bias. A PeftModel's adapters are part of its body.

    Losses then run on hidden states and never hold a batch's logits. The weight is the model's own
    parameter, so gradients reach it; `check_split` confirms the equation. ValueError for a head
    that isn't linear, or logits that are capped or scaled.
    """
    model = unwrapped(model)
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    for field, neutral in LOGIT_FIELDS.items():
        value = getattr(config, field, neutral)
        if value not in (None, neutral):
            raise _no_split(model, f"its config has {field}={value}, which changes the logits")
    if not isinstance(head, nn.Linear):
        raise _no_split(model, f"its output head is {type(head).__name__}, not a linear layer")
    if model.base_model is model:
        raise _no_split(model, "its body isn't a module apart from the head")
    return model.base_model, head.weight, head.bias


def head_weight(model: PreTrainedModel) -> torch.Tensor:
    """head_VH of `output_head` for those who have no use for a bias: ValueError for one."""
    _, head_VH, bias_V = output_head(model)
    if bias_V is not None:
        raise _no_split(model, "its output head has a bias")
    return head_VH


def without_bias(
    hidden_NH: torch.Tensor, head_VH: torch.Tensor, bias_V: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """States [N, H + 1] and head [V, H + 1] whose product has the bias in it, if there is one."""
    if bias_V is None:
        return hidden_NH, head_VH
    ones_N1 = torch.ones_like(hidden_NH[:, :1])
    return torch.cat([hidden_NH, ones_N1], 1), torch.cat([head_VH, bias_V[:, None]], 1)


def with_adapter(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """`model` with the PEFT adapter in `folder` merged into its weights: the layers then are plain
    again. In bf16 the sum is rounded once more than PEFT's own two products are.

    ValueError where peft isn't installed, for no adapter at the folder, one that can't be merged,
    or one whose tensors aren't those that this model needs.
    """
    if not (Path(folder) / "adapter_config.json").is_file():
        raise ValueError(
            f"target.adapter: got {folder}, expected a folder with adapter_config.json, as PEFT's "
            "save_pretrained writes it; correct the path"
        )
    try:
        from peft import PeftConfig, get_peft_model, set_peft_model_state_dict
        from peft.utils import get_peft_model_state_dict, load_peft_weights
    except ImportError as error:
        raise ValueError(f"target.adapter: got {folder}; install peft to read it") from error
    config = PeftConfig.from_pretrained(folder)
    if config.is_prompt_learning:
        raise _wrong_adapter(folder, f"a {config.peft_type.value} adapter, which can't be merged")
    try:
        wrapped = get_peft_model(model, config)
    except ValueError as error:  # none of the modules that it names
        raise _wrong_adapter(folder, f"an adapter with no place in it ({error})") from error
    # PEFT would skip what has no place, and leave what is missing as it was born.
    given = load_peft_weights(folder, device="cpu")
    needed = get_peft_model_state_dict(wrapped)
    shapes = [{name: t.shape for name, t in side.items()} for side in (given, needed)]
    wrong = sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()})
    if wrong:
        raise _wrong_adapter(folder, f"{len(wrong)} tensors that don't match ({wrong[0]}, ...)")
    set_peft_model_state_dict(wrapped, given)
    return wrapped.merge_and_unload()


def _wrong_adapter(folder: str, what: str) -> ValueError:
    return ValueError(
        f"target.adapter: got {folder} with {what}, expected an adapter trained on this very "
        "target; check target.path, or base_model_name_or_path in its adapter_config.json"
    )


def quantised_maps(model: PreTrainedModel) -> list[nn.Linear]:
    """The linear maps that quantising a target changes: all but its output head."""
    head = model.get_output_embeddings()
    return [part for part in model.modules() if type(part) is nn.Linear and part is not head]


def rounded_bytes(part: nn.Linear, kind: str) -> int:
    """Bytes of a map's weight once rounded; ValueError for one that int4's groups don't divide."""
    rows, width = part.weight.shape
    if kind == "int4" and width % GROUP:
        raise ValueError(
            f"target.quantise: got int4, {width} inputs, expected a multiple of {GROUP}; take int8"
        )
    return rows * (width + 5 if kind == "int8" else width // 2 + width // GROUP * 3)


def quantise(model: PreTrainedModel, kind: str) -> None:
    """Round a frozen model's maps, weights alone, from their fp32 values, so that it is the same
    target in bf16 and in fp32, on every device: int8 with a scale (fp32) a row, int4 with a scale
    (bf16) and a zero a group. ValueError as of `rounded_bytes`, or without torchao.
    """
    try:
        from torchao import quantization as ao

        config: Any = ao.Int8WeightOnlyConfig(set_inductor_config=False)
        if kind == "int4":
            grouped = ao.PerGroup(GROUP), ao.MappingType.ASYMMETRIC, torch.bfloat16
            config, four = ao.IntxWeightOnlyConfig(torch.int4, *grouped), _int4(ao.Int4Tensor)  # type: ignore[attr-defined]
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"target.quantise: got {kind}, no torchao >= 0.18; install it: draftsmith[quantised]"
        ) from error
    for part in quantised_maps(model):
        rounded_bytes(part, kind)  # refuses what can't be
        dtype = part.weight.dtype
        ao.quantize_(part.float(), config)
        if kind == "int4":
            part.weight = nn.Parameter(four.packed(part.weight), requires_grad=False)
        part.to(dtype)


@cache
def _int4(tensor: Any) -> Any:
    """torchao's int4 tensor, unpacked at each product: its own products are for one kind of device
    each, CUDA's for bf16 alone. Legend: G groups of E inputs, two halves to a byte, O outputs last.
    """

    class Int4Weight(tensor):
        @classmethod
        def packed(cls, weight: Any) -> Any:
            parts = weight.qdata + 8, weight.scale, weight.zero_point + 8
            steps_IO, *scales = (part.T.contiguous() for part in parts)
            first, last = steps_IO.byte().unflatten(0, (-1, GROUP)).chunk(2, 1)
            return cls(first | last << 4, *(x[:, None] for x in scales), [1, GROUP], weight.shape)

        def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            x_GEO = torch.cat([self.qdata & 15, self.qdata >> 4], 1).view(torch.int8)
            return x_GEO.sub_(self.zero_point).to(dtype).mul_(self.scale.to(dtype)).flatten(0, 1).T

    @Int4Weight.implements_torch_function(nn.functional.linear)
    def product(func: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
        return func(args[0], args[1].dequantize(args[0].dtype), *args[2:], **kwargs)

    return Int4Weight


def is_quantised(tensor: torch.Tensor) -> bool:
    """Whether a weight is one of torchao's, which multiplies but isn't a plain tensor."""
    return hasattr(tensor, "qdata")


def bytes_read(weight: Any) -> int:
    """Bytes of a weight as it lies in memory."""
    names = weight.__tensor_flatten__()[0] if is_quantised(weight) else ["data"]
    return sum(getattr(weight, name).nbytes for name in names)


def unwrapped(model: PreTrainedModel) -> PreTrainedModel:
    """The model inside a PeftModel, any other as it is; ValueError for learned prompts."""
    if not hasattr(model, "get_base_model"):
        return model
    wrapper: Any = model  # peft is optional, so its types aren't imported
    config = wrapper.active_peft_config
    if config.is_prompt_learning:
        raise ValueError(
            f"got a PeftModel with a {config.peft_type.value} adapter, expected one that changes "
            "weights (LoRA and its like): learned prompts aren't tokens; train a LoRA instead"
        )
    return wrapper.get_base_model()


def cut_rows(head_VH: torch.Tensor, rows: int) -> torch.Tensor:
    """An output head's first rows, without padding. A slice of all would cost a copy backward."""
    return head_VH if len(head_VH) == rows else head_VH[:rows]


@torch.no_grad()
def check_split(model: PreTrainedModel) -> None:
    """Run eight tokens both ways and compare: catches families that `output_head` doesn't know.
    ValueError where head(body(x)) and the model's logits differ by more than rounding, 1e-4 of the
    largest logit in fp32 and 1e-2 in lower precision.
    """
    (body, head_VH, bias_V), training = output_head(model), model.training
    model.eval()
    ids_BT = torch.arange(8, device=head_VH.device)[None] % head_VH.shape[0]
    hidden_BTH = body(input_ids=ids_BT, use_cache=False).last_hidden_state
    split_BTV = nn.functional.linear(hidden_BTH.to(head_VH.dtype), head_VH, bias_V).float()
    whole_BTV = model(input_ids=ids_BT, use_cache=False).logits.float()
    model.train(training)
    limit = 1e-4 if head_VH.dtype == torch.float32 else 1e-2
    error = ((split_BTV - whole_BTV).abs().max() / whole_BTV.abs().max().clamp_min(1e-9)).item()
    if not error <= limit:
        off = f"relative error {error:.1e}, limit {limit:.0e}"
        raise _no_split(model, f"body and head apart give other logits ({off})")


def _no_split(model: PreTrainedModel, reason: str) -> ValueError:
    return ValueError(
        f"got {type(model).__name__}, and {reason}; expected logits that are one matrix product of "
        "the last hidden state; train with a model of another family (Llama, Qwen, Mistral, Pythia)"
    )


def _shrunk(spec: TargetSpec) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Two random layers of 64 of the family at `spec.path`, with the tokenizer found there. What
    isn't on this machine is replaced, with a warning: the config by Llama's, the tokenizer by a
    byte-level one. Logits are padded beyond the tokenizer, as those of many published models are.
    """
    check_dtype(spec.dtype)
    tokenizer: PreTrainedTokenizerBase
    try:
        config: PretrainedConfig = load_config(spec.path, local_files_only=True).get_text_config()
    except ValueError:
        config = LlamaConfig(max_position_embeddings=4096)
        warnings.warn(f"target.shrink: no config at {spec.path}: a random Llama", stacklevel=3)
    try:
        tokenizer = load_tokenizer(spec.path, local_files_only=True)
    except ValueError:
        tokenizer = stand_in_tokenizer()
        warnings.warn(f"target.shrink: no tokenizer at {spec.path}: a stand-in", stacklevel=3)
    config.pad_token_id, config.bos_token_id = tokenizer.pad_token_id, tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    # Attention with as many key-value heads as heads stays so; grouped attention stays grouped.
    grouped = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    model = draft_from_config(
        config,
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=4 if grouped == config.num_attention_heads else 2,
        intermediate=128,
        seed=0,
        vocab_size=-(-(vocab_size(tokenizer) + 1) // 64) * 64,
        **{name: value for name, value in SMALL.items() if getattr(config, name, None)},
    )
    return model.bfloat16() if spec.dtype == "bfloat16" else model, tokenizer


GROUP = 32  # inputs that share a scale in int4; 64 and 128 lose more, and divide fewer widths
# Fields by which families change logits after the head, each with the value that changes nothing.
LOGIT_FIELDS = {
    "final_logit_softcapping": None,  # Gemma 2, Gemma 3n
    "logit_scale": 1,  # Cohere
    "logits_scaling": 1,  # Granite
    "lm_head_multiplier": 1,  # Falcon-H1
    "output_multiplier": 1,
}
# Sizes that only some families have, for the shrunk target: experts, latent attention.
SMALL = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
}
