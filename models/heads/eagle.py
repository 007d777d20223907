"""EAGLE-1 and EAGLE-3 heads (Li et al., arXiv 2401.15077 and 2503.01840), and the modules for
multi-token prediction (MTP) that models are trained with; on transformers' layers.

At position i the head reads what the target knew there and the token that came next, (f_i,
x_{i+1}), and predicts x_{i+2}. Its own output stands for the state that the target has not computed
yet, so it can go on alone.

    EAGLE-1: f = the target's last state; fc([e; f]) -> one layer -> f'; logits by the target's head
    EAGLE-3: g = fc([taps]); one layer on [norm(e); norm(g)] -> a; logits by its own head, norm(a);
             a is fed back in g's place
    MTP:     f as EAGLE-1's; fc([norm(e); norm(f)]) -> one ordinary layer -> norm -> f', fed back;
             logits by the target's head (DeepSeek-V3, arXiv 2412.19437; FastMTP, 2509.18362)
    Dovetail: EAGLE-1 with `GatedFusion` in the place of fc (2412.18934)

A pair (f_i, x_{i+1}) sits at rotary position i, in training and in decoding.

Shapes: B rows, T positions (any leading axes: X), H hidden, U width of the taps side by side, D
draft vocabulary, V rows of the target's LM head, A query heads, K key-value heads, E head width.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.models.heads.head import ANY_DEPTH, CONVERTED, TAKES, Kind, LayerHead, Reads
from draftsmith.models.layers.gated import GatedFusion
from draftsmith.models.layers.layer import (
    LAYER_CONFIGS,
    Attention,
    EagleLayer,
    OutputHead,
    layer_json,
    read_layer,
    rope_fields,
)
from draftsmith.models.layers.unrolled_attention import Unrolled
from draftsmith.models.layouts.eagle_layouts import (
    FLAGS,
    IDS,
    LAYOUTS,
    unread_by_llama_cpp,
    unread_by_sglang,
    unread_by_tensorrt,
)
from draftsmith.models.layouts.exported import Exported
from draftsmith.models.taps import NORM, Tap
from draftsmith.models.vocab import DraftVocab

# What EAGLE-3 is called on disk. By the first name vLLM and SGLang build Llama's layers; the norms
# on queries and keys of Qwen3's are known to vLLM alone, by the second.
EAGLE3_NAMES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
MTP_NAME, MTP_PREFIX = "DraftsmithMtp", "mtp."  # tensors are called as Qwen3-Next's are
GATED_NAME = "DraftsmithDovetail"


@dataclass(frozen=True)
class EagleConfig:
    """layer: sizes of the decoder layers, of Llama's or Qwen3's kind; hidden_size and vocab_size
    are the target's. version: 1 or 3; mtp: version 1 as an MTP module; fusion: of version 1, concat
    or Dovetail's gated. draft_vocab: rows of EAGLE-3's own LM head. fc_bias: of EAGLE-1's (the
    official ones have it, vLLM's loader has not).
    The norms are EAGLE-3.1's: fc_norm, one on each tap; norm_output, what is fed back is normed;
    norm_before_residual, the normed state is the residual; norm_before_fc, one norm over all taps.
    """

    layer: PretrainedConfig
    version: int = 3
    taps: tuple[Tap, ...] = (NORM,)
    draft_vocab: int = 0
    fc_bias: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    mtp: bool = False
    fusion: str = "concat"

    def __post_init__(self) -> None:
        layer, taps = self.layer, self.taps
        if self.version not in (1, 3) or layer.model_type not in LAYER_CONFIGS:
            raise ValueError(
                f"eagle: got version {self.version} with layers of {layer.model_type}, "
                f"expected version 1 or 3 and layers of {' or '.join(LAYER_CONFIGS)}"
            )
        if self.version == 1 and (taps != (NORM,) or any(getattr(self, f) for f in FLAGS)):
            raise ValueError(
                f"eagle 1: got taps {taps} or a norm of EAGLE-3.1, expected the tap {NORM!r} alone "
                "and none of them; use version 3"
            )
        if self.mtp and (self.version != 1 or self.fc_bias):
            raise ValueError(
                f"mtp: got version {self.version}, fc_bias={self.fc_bias}, expected 1 and no bias"
            )
        plain = self.version == 1 and not (self.mtp or self.fc_bias)
        if self.fusion != "concat" and not (plain and self.fusion == "gated"):
            raise ValueError(
                f"eagle: got fusion={self.fusion!r} of version {self.version}, mtp={self.mtp}, "
                f"fc_bias={self.fc_bias}; expected concat, or gated of version 1 with neither"
            )
        if self.version == 1 and layer.model_type != "llama" and not self.mtp:
            raise ValueError(
                f"eagle 1: got layers of {layer.model_type}, expected llama: servers know no "
                "others in it, and would skip their norms on queries and keys; use version 3"
            )
        if self.version == 3 and NORM in taps:
            raise ValueError(
                f"eagle 3: got taps {taps}, expected numbers of layers: no server taps the state "
                "after the final norm"
            )
        if self.version == 3 and not 1 <= self.draft_vocab <= layer.vocab_size:
            raise ValueError(
                f"eagle 3: got draft_vocab={self.draft_vocab}, expected 1 to the target's "
                f"{layer.vocab_size}"
            )
        if self.fc_norm and self.norm_before_fc:
            raise ValueError(
                "eagle 3: got fc_norm and norm_before_fc, expected at most one of them"
            )


class Eagle(LayerHead):
    """An EAGLE-1 or EAGLE-3 head, or an MTP module; `kind` says which."""

    kinds: ClassVar = {
        "eagle1": Kind("EAGLE-1", {"sglang": Reads("EAGLE"), "vllm": Reads("eagle")}, learns=True),
        "eagle3": Kind(
            "EAGLE-3",
            {
                "vllm": Reads("eagle3", ours=True),
                "sglang": Reads("EAGLE3", ours=True, misread=unread_by_sglang),
                "speculators": Reads(says="after export to=speculators"),
                "gguf": Reads("draft-eagle3", True, CONVERTED, misread=unread_by_llama_cpp),
                "tensorrt": Reads("Eagle3", True, TAKES, misread=unread_by_tensorrt),
            },
            learns=True,
        ),
        "dovetail": Kind("an EAGLE-1 head with Dovetail's gated fusion"),
        "mtp": Kind("an MTP module apart from its model", learns=True),
    }

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(layer := config.layer)
        self.config, gated = config, config.fusion == "gated"
        first = config.version == 1 and not config.mtp
        self.kind = "mtp" if config.mtp else "dovetail" if gated else f"eagle{config.version}"
        self.levels, self.taps = ANY_DEPTH, config.taps
        wide, eps = config.version == 3, layer.rms_norm_eps
        width = (len(config.taps) if wide else 2) * self.hidden
        self.fc: Any = (
            GatedFusion(self.hidden, eps)
            if gated
            else nn.Linear(width, self.hidden, bias=config.fc_bias)
        )
        self.layers: Any = nn.ModuleList(
            EagleLayer(layer, i, wide=wide and i == 0, bare=first and i == 0)
            for i in range(layer.num_hidden_layers)
        )
        if config.mtp:
            self.pre_fc_norm_embedding = LlamaRMSNorm(self.hidden, eps=eps)
            self.pre_fc_norm_hidden = LlamaRMSNorm(self.hidden, eps=eps)
            self.norm = LlamaRMSNorm(self.hidden, eps=eps)
        if not wide:
            return
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(self.hidden, eps=eps) for _ in config.taps)
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(width, eps=eps)
        self.norm = LlamaRMSNorm(self.hidden, eps=eps)
        self.lm_head = OutputHead(self.hidden, config.draft_vocab, bias=False)
        if config.draft_vocab < self.rows:
            self.set_vocab(DraftVocab(torch.arange(config.draft_vocab), self.rows))

    def set_vocab(self, vocab: DraftVocab) -> None:
        """Give EAGLE-3 the tokens that it drafts."""
        got, wanted = (len(vocab.ids_D), vocab.size), (self.config.draft_vocab, self.rows)
        assert got == wanted, (got, wanted)
        self.register_buffer("d2t", vocab.d2t_D)
        self.register_buffer("t2d", vocab.t2d_V)

    @property
    def vocab(self) -> DraftVocab:
        if not hasattr(self, "d2t"):
            return super().vocab
        assert isinstance(self.d2t, Tensor)
        return DraftVocab.from_offsets(self.d2t, self.rows)

    def fuse(self, taps_XU: Tensor) -> Tensor:
        """What the first step reads of the target, [..., H], from its taps side by side."""
        config = self.config
        if config.version == 1:
            return taps_XU
        if config.fc_norm:
            parts = zip(self.fc_norm, taps_XU.split(self.hidden, -1), strict=True)
            taps_XU = torch.cat([norm(part) for norm, part in parts], -1)
        if config.norm_before_fc:
            taps_XU = self.input_norm(taps_XU)
        return self.fc(taps_XU)

    def step(
        self, hidden_BTH: Tensor, tokens_BT: Tensor, positions_BT: Tensor, attention: Attention
    ) -> Tensor:
        """Its output [B, T, H] for pairs of a state (`fuse`d, or `fed_back`) and the next token."""
        embedded_BTH = self.embed(tokens_BT)
        if self.config.mtp:
            embedded_BTH = self.pre_fc_norm_embedding(embedded_BTH)
            hidden_BTH = self.pre_fc_norm_hidden(hidden_BTH)
        if self.config.version == 1:
            hidden_BTH = self.fc(torch.cat([embedded_BTH, hidden_BTH], -1))
        rotary = self.rotary(hidden_BTH, positions_BT)
        for index, layer in enumerate(self.layers):
            normed = self.config.norm_before_residual
            entry_BTI, residual_BTH = layer.enter(hidden_BTH, embedded_BTH, normed_residual=normed)
            mixed_BTO = attention(index, *layer.project(entry_BTI, rotary))
            hidden_BTH = layer.leave(residual_BTH, mixed_BTO)
        return hidden_BTH

    def unroll(
        self,
        hidden_BTH: Tensor,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        mask: Tensor | None = None,
        *,
        steps: int,
    ) -> list[Tensor]:
        """The training-time test: every position drafts `steps` tokens on, reading the text's.

        hidden: `fuse`d states f_t. tokens: x_t. positions: from 0 in each document. mask: [B, 1, T,
        T] bool, who may attend whom; None: causal. Step s at t reads x_{t+1+s} and what step s - 1
        gave (f_t at first), attends to step 0's pairs at t' <= t and to its own later ones, and
        predicts x_{t+2+s}; past the row's end it reads token 0. Returns of each step what the LM
        head multiplies, [B, T, H].
        """
        attention, states = Unrolled(mask), []
        for step in range(steps):
            tokens_BT = F.pad(tokens_BT[:, 1:], (0, 1))
            output_BTH = self.step(hidden_BTH, tokens_BT, positions_BT + step, attention)
            states.append(self.before_head(output_BTH))
            hidden_BTH = self.fed_back(output_BTH)
        return states

    def before_head(self, output_XH: Tensor) -> Tensor:
        return self.norm(output_XH) if hasattr(self, "norm") else output_XH

    def fed_back(self, output_XH: Tensor) -> Tensor:
        """What the next step reads in place of the target's state."""
        normed = self.config.norm_output or self.config.mtp
        return self.norm(output_XH) if normed else output_XH

    @property
    def head_DH(self) -> Tensor:
        """The LM head: its own rows, or (EAGLE-1, MTP) all of the target's."""
        return self.target_head_VH if self.config.version == 1 else self.lm_head.weight

    def to_json(self) -> dict[str, Any]:
        config = self.config
        kind = config.layer.model_type
        made = layer_json(config.layer) | {
            **rope_fields(config.layer.rope_parameters or {}),
            "tie_word_embeddings": False,
            "use_cache": True,
            "torch_dtype": str(self.fc.weight.dtype).removeprefix("torch."),
        }
        if config.mtp:
            return made | {"architectures": [MTP_NAME]}
        if config.fusion == "gated":
            return made | {"architectures": [GATED_NAME]}
        if config.version == 1:
            return made | {"architectures": ["LlamaForCausalLM"], "bias": config.fc_bias}
        made |= {name: getattr(config, name) for name in FLAGS}
        made |= {"architectures": [EAGLE3_NAMES[kind]], **tap_fields(config.taps)}
        return made | {"draft_vocab_size": config.draft_vocab, "target_hidden_size": self.hidden}

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "Eagle":
        if config.get("architectures") == [MTP_NAME]:
            return cls(EagleConfig(read_layer(config), 1, mtp=True))
        if config.get("architectures") == [GATED_NAME]:
            return cls(EagleConfig(read_layer(config), 1, fusion="gated"))
        if config.get("architectures") not in [[name] for name in EAGLE3_NAMES.values()]:
            layer = read_layer(config)
            return cls(EagleConfig(layer, 1, fc_bias=bool(config.get("bias", True))))
        return cls(EagleConfig(**read_eagle3(config)))

    def on_disk(self) -> dict[str, Tensor]:
        state = dict(self.state_dict())
        if self.config.mtp:
            return {MTP_PREFIX + name: t for name, t in state.items()}
        if self.config.version == 3 and len(self.layers) == 1:
            state = {name.replace("layers.0.", "midlayer.", 1): t for name, t in state.items()}
        return state

    def from_disk(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = {name.removeprefix(MTP_PREFIX): t for name, t in tensors.items()}
        return {name.replace("midlayer.", "layers.0.", 1): t for name, t in tensors.items()}

    def exported(self, to: str, target: PreTrainedModel, K: int) -> Exported:
        config = self.to_json()
        # A dynamic rotary embedding changes with this number.
        if config["rope_parameters"].get("rope_type") != "dynamic":
            limit = getattr(target.config.get_text_config(), "max_position_embeddings", 0)
            limit = max(limit, config["max_position_embeddings"])
            config["max_position_embeddings"] = limit
        return LAYOUTS[self.kind, to](config, self.on_disk(), target, K)


def read_eagle3(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of EAGLE-3's `EagleConfig` from a config.json."""
    layer, taps = read_layer(config), config.get(IDS)
    if not isinstance(taps, list):
        raise ValueError(
            f"config.json: got no {IDS} at its top level, expected the list of taps; `python "
            "-m draftsmith doctor` says what such a folder needs"
        )
    read = {"layer": layer, "taps": tuple(taps), "draft_vocab": int(config["draft_vocab_size"])}
    return read | {name: bool(config.get(name, False)) for name in FLAGS}


def tap_fields(taps: tuple[Tap, ...]) -> dict[str, Any]:
    """The taps for vLLM (top level: layers already run) and SGLang (the layer of that output)."""
    ids = [int(tap) for tap in taps]
    nested = {"use_aux_hidden_state": True, IDS: [i - 1 for i in ids]}
    return {IDS: ids, "eagle_config": nested}
