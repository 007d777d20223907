"""Tiny Clover-2 and Falcon heads, and their laws as an obvious loop finds them."""

import math

import torch
import torch.nn.functional as F
from randomised import randomised
from tiny_hydra import layer
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.heads.clover import Clover
from draftsmith.models.heads.falcon import Falcon
from draftsmith.models.layers.layer import EagleLayer, Rotary, causal
from draftsmith.models.taps import target_states
from draftsmith.models.target import head_weight

KINDS = ["clover2", "falcon-1", "falcon-2", "falcon-3"]


def fresh(kind: str, target: PreTrainedModel, levels: int = 6) -> Clover | Falcon:
    """As training begins; "falcon-2": with a block of 2."""
    rows, tap = len(head_weight(target)), target.config.num_hidden_layers
    torch.manual_seed(1)
    if kind == "clover2":
        head: Clover | Falcon = Clover(layer(vocab_size=rows, num_hidden_layers=2), tap, levels)
    else:
        head = Falcon(layer(vocab_size=rows), levels, int(kind[-1]))
    return head.init_from(target)


def made(kind: str, target: PreTrainedModel, levels: int = 6) -> Clover | Falcon:
    """Frozen, and no weight where it began."""
    head = fresh(kind, target, levels).eval().requires_grad_(False)
    randomised(head)
    return head


def unrolled(head: Clover | Falcon, states_BTH: Tensor, ids_BT: Tensor) -> list[Tensor]:
    """What the LM head multiplies at each depth, of rows that are a text each."""
    next_BT = ids_BT.roll(-1, 1)
    at_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
    if isinstance(head, Falcon):
        return list(head.drafted(states_BTH, next_BT, at_BT).unbind(2))
    state = head.augmented(states_BTH, next_BT, at_BT, causal())
    found = [head.state(state, None)]
    for depth in range(1, head.levels):
        token = head.embed(ids_BT.roll(-1 - depth, 1))
        state = head.step(state, token)
        found.append(head.state(state, token))
    return found


def lesson(head: Clover | Falcon, target: PreTrainedModel, tokens: int, steps: int = 60) -> None:
    """Teach it that after x comes x + 1."""
    learner = torch.optim.Adam(head.parameters(), lr=0.02)
    ids_BT = (torch.arange(tokens // 5)[:, None] * 5 + torch.arange(16)) % tokens
    states_BTH = target_states(target, head.taps, input_ids=ids_BT).taps_BTF
    for _ in range(steps):
        loss = torch.zeros(())
        for depth, state_BTH in enumerate(unrolled(head, states_BTH, ids_BT)):
            wanted_N = ids_BT[:, 2 + depth :].flatten()
            logits_NV = state_BTH[:, : -2 - depth].flatten(0, 1) @ head.head_VH(depth).T
            loss = loss + F.cross_entropy(logits_NV, wanted_N)
        learner.zero_grad()
        loss.backward()
        learner.step()


def states_of(target: PreTrainedModel, head: Clover | Falcon, text: list[int]) -> Tensor:
    """What the target knew at each token, [1, T, H]."""
    return target_states(target, head.taps, input_ids=torch.tensor([text])).taps_BTF


def attended(
    part: EagleLayer, rotary: Rotary, entry_TH: Tensor, at: list[int], sees_RT: Tensor
) -> Tensor:
    """What the positions `at` mix of all, [R, O], by the formula."""
    count = len(entry_TH)
    turned = rotary(entry_TH[None], torch.arange(count)[None])
    query, key, value = (x[0].transpose(0, 1) for x in part.project(entry_TH[None], turned))
    key, value = (x.repeat_interleave(query.shape[0] // x.shape[0], 0) for x in (key, value))
    scores = query[:, at] @ key.mT / math.sqrt(query.shape[-1])
    return (scores.masked_fill(~sees_RT, -torch.inf).softmax(-1) @ value).transpose(0, 1).flatten(1)


def last_state(head: Clover | Falcon, states_1TH: Tensor, text: list[int]) -> Tensor:
    """What the LM head multiplies for the token after a text, [H]; its first tokens are those of
    the states, the last ones are drafted.
    """
    drafted = len(text) - 1 - states_1TH.shape[1]
    if isinstance(head, Falcon):
        return _falcon(head, states_1TH[0], text, drafted)
    begun = text[1 : len(text) - drafted]
    hidden_TH = head.enter(states_1TH[0], head.embed(torch.tensor(begun)))
    count = len(begun)
    for part in head.layers:
        causal_TT = torch.ones(count, count, dtype=torch.bool).tril()
        entry_TH = part.input_layernorm(hidden_TH)
        mixed = attended(part, head.rotary, entry_TH, list(range(count)), causal_TT)
        hidden_TH = part.leave(hidden_TH, mixed)
    state_H, token_H = head.norm(hidden_TH)[-1], None
    for token in text[len(text) - drafted :]:
        token_H = head.embed(torch.tensor(token))
        state_H = head.step(state_H, token_H)
    if token_H is None:
        return head.head_norm(head.first(state_H))
    return head.head_norm(head.later(torch.cat([state_H, token_H])))


def _falcon(head: Falcon, states_TH: Tensor, text: list[int], drafted: int) -> Tensor:
    """Block by block, each over all pairs anew."""
    k = head.block
    while True:
        count = len(states_TH)
        tokens_T = torch.tensor(text[1 : count + 1])
        y_TH = head.lstm(torch.cat([head.embed(tokens_T), states_TH], -1))[0]
        at = list(range(max(0, count - k), count))
        sees_RT = torch.ones(len(at), count, dtype=torch.bool)
        mixed = attended(head.layer, head.rotary, y_TH, at, sees_RT)
        drafted_RH = head.layer.leave(y_TH[at], mixed)
        assert len(drafted_RH) == k, "a text of k pairs"
        if drafted < k:
            return drafted_RH[drafted]
        states_TH, drafted = torch.cat([states_TH, drafted_RH]), drafted - k
