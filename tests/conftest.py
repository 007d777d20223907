"""Small models and a tokenizer that tests share: built in memory in under a second, no network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.models.tokenizer import stand_in_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}\n"
    "{% else %}<|assistant|>{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SHARED = Path(__file__).resolve().parents[2] / "shared"


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


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = stand_in_tokenizer(320)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def tiny_target(tiny_tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Frozen, as targets are: it decodes through the lean body, the draft through its own."""
    return build_llama(len(tiny_tokenizer), layers=3, hidden=32, seed=0).requires_grad_(False)


@pytest.fixture(scope="session")
def tiny_draft(tiny_tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return build_llama(len(tiny_tokenizer), layers=1, hidden=32, seed=1)


@pytest.fixture(scope="session")
def gsm8k_path() -> Path:
    path = SHARED / "data" / "gsm8k" / "train.jsonl"
    if not path.exists():
        pytest.skip("GSM8K is not beside this checkout (../shared/data/gsm8k)")
    return path


@pytest.fixture(scope="session")
def target_15m() -> Path:
    path = SHARED / "models" / "target-15m"
    if not path.exists():
        pytest.skip("the 15M target is not beside this checkout (../shared/models/target-15m)")
    return path
