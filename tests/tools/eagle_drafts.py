"""EAGLE heads of several makes, random or counting, with their targets."""

from dataclasses import replace
from typing import Any

import torch
from tiny_llama import build_llama
from torch import nn
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from draftsmith.decode.drafters.eagle import EagleDrafter
from draftsmith.decode.drafting.base import Admitted
from draftsmith.decode.policies.timing import round_of
from draftsmith.decode.token_tree import TokenTree
from draftsmith.decode.tree_shapes import parse_tree
from draftsmith.models.heads.eagle import Eagle, EagleConfig
from draftsmith.models.heads.peagle import PEagle, PEagleConfig
from draftsmith.models.taps import target_states
from draftsmith.models.vocab import DraftVocab

VOCAB = 320

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "mlp_bias": False,
}


def made(name: str, **sizes: Any) -> Eagle:
    """A random head, its norms and its draft vocabulary not what they are born as."""
    about = dict((HEADS | PARALLEL)[name])
    kind, layers = about.pop("kind", LlamaConfig), about.pop("layers", 1)
    config = kind(**{**SIZES, "num_hidden_layers": layers, **sizes})
    torch.manual_seed(5)
    own = "parallel" in about
    head = PEagle(PEagleConfig(config, **about)) if own else Eagle(EagleConfig(config, **about))
    head.eval().requires_grad_(False)
    for parameter in head.parameters():
        if parameter.ndim == 1:
            parameter.copy_(1 + torch.randn_like(parameter) / 3)
        else:
            nn.init.normal_(parameter, std=0.2)
    if 0 < head.config.draft_vocab < head.rows:
        ids_D = torch.randperm(head.rows)[: head.config.draft_vocab].sort().values
        head.set_vocab(DraftVocab(ids_D, head.rows))
    return head


def counting(wrong: float) -> tuple[PreTrainedModel, Eagle]:
    """A target that mostly says the token after the last one, and an EAGLE-1 head that knows.

    wrong: how much the layers of both, which are random, take part; at 0 the two laws are equal.
    """
    target = build_llama(VOCAB, layers=3, hidden=32, seed=0).requires_grad_(False)
    table_VH = target.get_input_embeddings().weight
    # Of states that the final norm leaves as they are.
    nn.init.normal_(table_VH).div_(table_VH.square().mean(-1, keepdim=True).sqrt())
    target.lm_head.weight.copy_(table_VH.roll(1, 0) * 0.3)
    head = made("eagle1")
    nn.init.zeros_(head.fc.bias)
    head.fc.weight.copy_(torch.cat([torch.eye(32), torch.zeros(32, 32)], 1))
    for layer in (*target.model.layers, *head.layers):
        layer.self_attn.o_proj.weight.mul_(wrong)
        layer.mlp.down_proj.weight.mul_(wrong)
    return target, head


THREE: dict[str, Any] = {"version": 3, "taps": (1, 2), "draft_vocab": VOCAB // 2}

HEADS: dict[str, dict[str, Any]] = {
    "eagle1": {"version": 1, "fc_bias": True},
    "eagle1-two": {"version": 1, "layers": 2},
    "dovetail": {"version": 1, "fusion": "gated"},
    "mtp": {"version": 1, "mtp": True},
    "mtp-qwen": {"version": 1, "mtp": True, "kind": Qwen3Config},
    "eagle3": THREE,
    "eagle3-two": THREE | {"layers": 2, "taps": (0, 1, 2), "fc_norm": True, "norm_output": True},
    "eagle3-norms": THREE | {"norm_before_residual": True, "norm_before_fc": True},
    "eagle3-qwen": THREE | {"kind": Qwen3Config, "draft_vocab": VOCAB, "taps": (3,)},
}
PARALLEL: dict[str, dict[str, Any]] = {
    "peagle": THREE | {"parallel": 6, "layers": 2},
    "parallelspec": THREE | {"parallel": 6, "own_masks": True, "draft_vocab": VOCAB},
}
TEXTS = [[(7 * i + 31 * row) % VOCAB for i in range(5 + 4 * row)] for row in range(4)]


def begin(drafter: EagleDrafter, target: PreTrainedModel, texts: list[list[int]]) -> None:
    """Prefill texts whose last tokens are pending, with garbage behind the shorter ones."""
    lens_R = torch.tensor([len(text) - 1 for text in texts])
    tokens_RN = torch.full((len(texts), int(lens_R.max())), 3)
    for row, text in enumerate(texts):
        tokens_RN[row, : len(text) - 1] = torch.tensor(text[:-1])
    taps_RNU = target_states(target, drafter.taps, input_ids=tokens_RN).taps_BTF
    pending_R = torch.tensor([text[-1] for text in texts])
    drafter.reset(len(texts), 64)
    drafter.prefill(Admitted(torch.arange(len(texts)), tokens_RN, lens_R, pending_R, taps_RNU))


def draft(
    drafter: EagleDrafter, texts: list[list[int]], tree: str = "chain", K: int | None = None
) -> TokenTree:
    """A greedy round's tree."""
    plan = parse_tree(tree, K)
    request = round_of(plan, len(texts), max(map(len, texts)), torch.device("cpu"))
    lens_B = torch.tensor([len(text) - 1 for text in texts])
    pending_B = torch.tensor([text[-1] for text in texts])
    request = replace(request, lens_B=lens_B, pending_B=pending_B, want_q=True)
    return drafter.propose(request)
