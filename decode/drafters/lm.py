"""A standalone draft language model as the drafter.

Shapes: B rows, D levels, L = D + 1, N prompt tokens, V vocabulary.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafters.base import Round
from draftsmith.decode.runner import Runner, Seen, round_up
from draftsmith.decode.sampling import choose, transform
from draftsmith.decode.token_tree import WITH_REPLACEMENT, TokenTree, chain
from draftsmith.models.target import split_head


class LMDrafter:
    """Chains from a small causal LM with a KV pool of its own.

    tail_B2 holds each row's last two tokens, the second one pending. The first draft call feeds
    both: that brings the KV up to date whatever was accepted (after a full acceptance the last
    drafted token was never fed), so catching up costs no pass of its own.
    """

    kind = "lm"

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        self.runner = Runner(model, vocab_size)
        self.context = context_of(model)

    def nodes(self, levels: int) -> int:
        return levels + 1

    def reset(self, rows: int, slots: int) -> None:
        device = self.runner.device
        self.pool = self.runner.pool(rows, slots)
        self.tail_B2 = torch.zeros(rows, 2, dtype=torch.int64, device=device)

    def prefill(self, rows_R: Tensor, tokens_RN: Tensor, lens_R: Tensor, pending_R: Tensor) -> None:
        self.runner.prefill(self.pool, rows_R, tokens_RN, lens_R)
        last_R = tokens_RN.gather(1, lens_R[:, None] - 1)[:, 0]
        self.tail_B2[rows_R] = torch.stack([last_R, pending_R], 1)

    def propose(self, request: Round) -> TokenTree:
        params, levels = request.params, request.levels
        first_slot_B = request.lens_B - 1
        width = min(round_up(request.top + levels), self.pool.slots)
        tokens = [request.pending_B]
        q_logits = []
        fed_BN = self.tail_B2
        for level in range(levels):
            slot_B = first_slot_B if level == 0 else request.lens_B + level
            q_logits_BV = self._last_logits(fed_BN, slot_B, width)
            q_logits_BV = transform(q_logits_BV, params.temperature, params.top_k, params.top_p)
            race_BV = None if request.race_BDV is None else request.race_BDV[:, level]
            tokens.append(choose(q_logits_BV, race_BV))
            q_logits.append(q_logits_BV)
            fed_BN = tokens[-1][:, None]
        return TokenTree(
            torch.stack(tokens, 1),
            chain(levels, self.runner.device),
            request.law,
            torch.stack(q_logits, 1) if request.law == WITH_REPLACEMENT else None,
        )

    def extend(self, tokens_BL: Tensor, n_new_B: Tensor) -> None:
        known = torch.cat([self.tail_B2, tokens_BL], 1)
        at_B2 = n_new_B[:, None] + torch.arange(2, device=known.device)
        self.tail_B2 = known.gather(1, at_B2)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights one draft call reads: everything but an untied embedding table."""
        return weights_read(self.runner.model)

    def _last_logits(self, tokens_BN: Tensor, first_slot_B: Tensor, width: int) -> Tensor:
        length = tokens_BN.shape[1]
        at_BN = first_slot_B[:, None] + torch.arange(length, device=tokens_BN.device)
        seen = Seen(first_slot_B, width)
        hidden_BNH = self.runner.verify(self.pool, tokens_BN, at_BN, at_BN, seen)
        return self.runner.logits(hidden_BNH[:, -1])


def context_of(model: PreTrainedModel) -> int:
    """Positions that a model is configured for."""
    return int(getattr(model.config, "max_position_embeddings", 1 << 30))


def weights_read(model: PreTrainedModel) -> int:
    """Bytes of weights a one-token forward reads. An embedding row is negligible; a tied table
    counts once, as the LM head.
    """
    embedding, head = model.get_input_embeddings().weight, split_head(model)[1]
    assert isinstance(embedding, Tensor)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return total if head is embedding else total - embedding.numel() * embedding.element_size()
