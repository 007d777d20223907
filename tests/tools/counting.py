"""A target that (nearly) counts: after token x comes x + 1, whatever came before."""

import torch
from tiny_llama import build_llama
from torch import Tensor
from transformers import LlamaForCausalLM


@torch.no_grad()
def counting_target(tokens: int, rows: int, *, blur: float = 0.0) -> LlamaForCausalLM:
    """tokens: after the last one comes token 0; rows: of its LM head, padding included. blur: how
    much its layers say; at 0 a state is its token's embedding, whatever came before.
    """
    target = build_llama(rows, layers=2, hidden=32, seed=3).requires_grad_(False)
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.mul_(blur)
        layer.mlp.down_proj.weight.mul_(blur)
    table = target.model.embed_tokens.weight.normal_()  # the padding token's row too
    table.div_(table.norm(dim=-1, keepdim=True))
    target.lm_head.weight.zero_()
    target.lm_head.weight[:tokens] = 1.4 * ahead(table[:tokens], 1)
    return target


def ahead(table_TH: Tensor, steps: int) -> Tensor:
    """LM head rows by which the embedding of x says x + steps."""
    return table_TH.roll(steps, 0)
