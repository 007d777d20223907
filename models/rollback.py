"""Which models a decoder can take a rejected draft back from."""

from transformers import PreTrainedModel

LINEAR = "linear_attention"  # transformers' name for layers that keep a state instead of keys
ROW_BOUND = {"dynamic", "longrope"}


def refuse_what_cannot_roll_back(model: PreTrainedModel, known: bool = False) -> None:
    """ValueError for a model with state other than the keys and values of every token; known: but
    for layers that keep a state which a round's commit can go on with.
    """
    config = model.config.get_text_config()
    unknown = set(getattr(config, "layer_types", None) or ())
    unknown -= {"full_attention", "sliding_attention", *[LINEAR] * known}
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [part for part in rope.values() if isinstance(part, dict)] or [rope]  # of layer types
    row_bound = ROW_BOUND & {part.get("rope_type") for part in ropes}
    reasons = {
        "a recurrent state": getattr(model, "_is_stateful", False) and not known,
        f"layers of type {sorted(unknown)}": unknown,
        "attention in chunks": getattr(config, "attention_chunk_size", None),
        "layers that share their keys and values": getattr(config, "num_kv_shared_layers", 0),
        "keys and values of different widths": getattr(config, "kv_lora_rank", None),
        # Which factors they use depends on the longest row of the batch, not on the prompt alone.
        f"rotary embeddings of type {sorted(ROW_BOUND)}": row_bound,
        "capped attention logits": getattr(config, "attn_logit_softcapping", None),
        # Hybrids don't say; they are compared with their own forward.
        "attention that can't be replaced": not (model._supports_attention_backend or known),
    }
    for reason, found in reasons.items():
        if found:
            raise ValueError(
                f"model {type(model).__name__}: got {reason}, expected full or sliding attention "
                "in every layer and one key and value a token (Llama, Qwen, Mistral, Mixtral, "
                "Gemma 3 and GPT-OSS are tested; of targets alone also Mamba-2, Bamba, Qwen3-Next "
                "and Qwen3.5): rejected drafts could not be rolled back"
            )
