"""A random Llama for tests, a chat template, and where shared inputs lie."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}\n"
    "{% else %}<|assistant|>{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SHARED = Path(__file__).resolve().parents[3] / "shared"


def build_llama(vocab_size: int, *, layers: int, hidden: int, seed: int) -> LlamaForCausalLM:
    """A random Llama in fp32 whose logits are spread enough that greedy text varies."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=0,
        pad_token_id=1,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()
