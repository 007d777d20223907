"""What GPU runs are made of: models of published shapes made on the device, and graph replays.

The random models count: the embedding of token t dominates the residual stream and row t + 1 of
the head matches it, so after t comes t + 1 whatever the layers between, which do all of their work.
A draft whose head is wrong after a chosen share of the tokens is then accepted with a known
probability, in our decoder and in any other. Such acceptance is simulated, and every row says so.
"""

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
)

from draftsmith.decode.forward.product import lay_side_by_side
from draftsmith.decode.policies import timing as measure

# Layers, hidden, intermediate size, heads, key-value heads, vocabulary; `toy` shapes for CPUs.
LLAMA_8B = (32, 4096, 14336, 32, 8, 128_256)
EAGLE = (1, *LLAMA_8B[1:])  # one layer of the target's width and a head of its own
QWEN3_600M = (28, 1024, 3072, 16, 8, 128_256)  # with the target's vocabulary
TOY, TOY_EAGLE, TOY_LM = (4, 64, 128, 4, 2, 997), (1, 64, 128, 4, 2, 997), (2, 64, 64, 4, 2, 997)
LOUD = 30.0  # of the embedding, against sublayer outputs of about 1


def counting_lm(shape: tuple[int, ...], device: str, *, accept: float = 1.0) -> PreTrainedModel:
    """A frozen bf16 model of the shape, made on the device, whose next token is right with
    probability `accept`.
    """
    layers, hidden, intermediate, heads, kv_heads, vocab = shape
    kind = Qwen3Config if shape == QWEN3_600M else LlamaConfig
    config = kind(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128 if hidden >= 1024 else hidden // heads,
        vocab_size=vocab,
        max_position_embeddings=16_384,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.eval().requires_grad_(False).get_input_embeddings().weight.normal_(std=LOUD)
    set_acceptance(model, accept)
    lay_side_by_side(model)
    return model


@torch.no_grad()
def set_acceptance(model: PreTrainedModel, accept: float) -> None:
    """After a share 1 - accept of the tokens, drawn by lot, the head is wrong; in place."""
    table_VH, head_VH = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    token_V = torch.arange(len(table_VH), device=table_VH.device)
    lot_V = torch.randperm(len(token_V), generator=torch.Generator().manual_seed(1))
    wrong_V = lot_V.to(token_V.device) >= accept * len(token_V)
    next_V = (token_V + torch.where(wrong_V, 8, 1)) % len(token_V)
    head_VH.zero_().index_add_(0, next_V, table_VH / (LOUD * table_VH.shape[1] ** 0.5))


def acceptance_for(tau: float, K: int) -> float:
    """The acceptance a of each token at which a chain emits tau = 1 + a + ... + a^K tokens."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        reached = sum(middle**i for i in range(K + 1))
        low, high = (middle, high) if reached < tau else (low, middle)
    return low


def graphed(call: Callable[[], object], device: str, copies: int = 1) -> Callable[[], object]:
    """`copies` calls in a row, on CUDA as the replay of their recording."""
    return measure.graphed(lambda: [call() for _ in range(copies)], torch.device(device))
