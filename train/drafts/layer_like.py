"""Decoder layers of a head, in the sizes of its target's."""

from transformers import (
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from draftsmith.models.heads.layer import LAYER_CONFIGS, LAYER_FIELDS
from draftsmith.models.target import split_head

LLAMA_ROTARY = ("llama", "mistral", "qwen2", "qwen3")  # the whole head, by one rope_parameters


def layer_like(target: PreTrainedModel, layers: int = 1) -> PretrainedConfig:
    """Sizes of a head's own decoder layers: those of its target's, in Llama's form or Qwen3's.

    Positions are turned as the target's are, where its family turns them as Llama's does. Whatever
    the target's activation, theirs is silu: servers know no other in such layers.
    """
    config = target.config.get_text_config()
    names = (*LAYER_FIELDS, *(("rope_parameters",) if config.model_type in LLAMA_ROTARY else ()))
    sizes = {name: getattr(config, name, None) for name in names}
    sizes |= {"num_hidden_layers": layers, "vocab_size": split_head(target)[1].shape[0]}
    sizes["hidden_act"] = "silu"
    sizes["intermediate_size"] = sizes["intermediate_size"] or 4 * config.hidden_size
    kind = LAYER_CONFIGS.get(config.model_type, LlamaConfig)
    return kind(**{name: value for name, value in sizes.items() if value is not None})
