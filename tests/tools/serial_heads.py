"""Chimera and Mixture of Attentions for tiny targets, and what they draft by an obvious loop: over
the whole text for each token, with one plain attention.

Shapes: T positions, H hidden, V rows of the target's LM head, N tokens that the target has read.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from draftsmith.models.heads.chimera import Chimera
from draftsmith.models.heads.mixture import Mixture
from draftsmith.models.layers.layer import Attention
from draftsmith.models.taps import target_states

KINDS = ("chimera", "mixture")
Serial = Chimera | Mixture


def serial(kind: str, target: PreTrainedModel, *, wrong: float = 1.0, levels: int = 4) -> Serial:
    """A head in which no tensor is what it was born as. wrong: how much its layers take part; at 0
    it says after a token what the target's LM head makes of that token's embedding.
    """
    sizes = target.config.to_dict() | {"num_hidden_layers": 1 + (kind == "mixture")}
    names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("num_hidden_layers", "max_position_embeddings")
    layer = LlamaConfig(intermediate_size=48, **{name: sizes[name] for name in names})
    torch.manual_seed(5)
    head: Serial = Chimera(layer, levels) if kind == "chimera" else Mixture(layer, (1, 2))
    head.init_from(target).eval().requires_grad_(False)
    for name, parameter in head.named_parameters():
        if parameter.ndim == 1:
            parameter.copy_(parameter + wrong * torch.randn_like(parameter) / 3)
        elif "heads" not in name:
            nn.init.normal_(parameter, std=0.2)
        else:
            parameter.add_(0.02 * wrong * torch.randn_like(parameter))
    layers = [head.layer] if isinstance(head, Chimera) else head.layers
    for each in layers:
        each.self_attn.o_proj.weight.mul_(wrong)
        each.mlp.down_proj.weight.mul_(wrong)
    if isinstance(head, Chimera):
        block, narrow = head.trigram
        block.linear.weight.mul_(wrong)
        old_H3H = torch.cat([torch.zeros(head.hidden, 2 * head.hidden), torch.eye(head.hidden)], 1)
        narrow.weight.copy_(wrong * narrow.weight + (1 - wrong) * old_H3H)
    return head


def plainly(allowed_TT: Tensor) -> Attention:
    """The formula of attention, with these columns for each row."""

    def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[2] // key.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~allowed_TT, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    return attend


def following(
    head: Serial, target: PreTrainedModel, read: list[int], path: list[int], twin: str = ""
) -> Tensor:
    """Logits [V] after `read`, which the target has read, and the tokens of a path. Twins: as in
    `standing`.
    """
    state_I = standing(head, target, read, path, twin)
    head_VI = head.head_DH if isinstance(head, Mixture) else head.head_VH(len(path) - 1)
    return head_VI @ state_I


def standing(
    head: Serial, target: PreTrainedModel, read: list[int], path: list[int], twin: str = ""
) -> Tensor:
    """What the LM head multiplies there: f' [H], or [h; f].

    Twins: "turned", the path stands one position further; "order", a trigram is read backwards;
    "grams", trigrams stand for the tokens between; "grown", the memory goes on over the path.
    """
    text, n = [*read, *path], len(read)
    known = torch.tensor([text if twin == "grown" else read])
    states = target_states(target, head.taps, input_ids=known)
    if isinstance(head, Mixture):
        known_1NH = head.fuse(states.taps_BTF)
        rows, last = torch.arange(len(text) - 1), known.shape[1] - 1
        beyond = (0, 0, 0, max(0, len(rows) - known.shape[1]))
        memory_1TH = F.pad(known_1NH, beyond, value=1e4)[:, : len(rows)]  # is unseen
        seen_TT = rows <= rows[:, None]
        at_1T = (rows + (rows >= n) * (twin == "turned"))[None]
        each = plainly(seen_TT), plainly(seen_TT & (rows <= last))
        return head.step(memory_1TH, torch.tensor([text[1:]]), at_1T, *each)[0, -1]
    stand_NH = states.norm_BTG[0]
    for place in range(n, len(text)):
        gram = [text[max(0, place - back)] for back in (2, 1, 0)]
        gram = gram[::-1] if twin == "order" else gram
        g_1H = head.trigram(head.embed(torch.tensor(gram)).flatten()[None])
        rows_1TH = torch.cat([stand_NH, g_1H])[None]
        at_1T = torch.arange(place + 1)[None]
        at_1T = at_1T + (at_1T >= n) * (twin == "turned")
        entry_1TH = head.layer.input_layernorm(rows_1TH)
        sides = head.layer.project(entry_1TH, head.rotary(entry_1TH, at_1T))
        mixed_1TO = plainly(torch.ones(place + 1, place + 1) > 0)(0, *sides)
        f_1H = head.norm(head.layer.leave(rows_1TH, mixed_1TO))[0, -1:]
        stand_NH = torch.cat([stand_NH, g_1H if twin == "grams" else f_1H])
    return torch.cat([states.norm_BTG[0, -1], f_1H[0]])
