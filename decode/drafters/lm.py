"""A standalone draft language model as the drafter.

Shapes: B rows, L tokens of a kept path, N prompt tokens or nodes, F nodes fed, V vocabulary.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Admitted, Drafter, Fed, Feed, Frontier, Kept, Round
from draftsmith.decode.drafting.grow_tree import grow
from draftsmith.decode.forward.runner import Runner, Seen, context_of, round_up
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.target import bytes_read, output_head
from draftsmith.models.vocab import DraftVocab


class LMDrafter(Drafter):
    """Trees and chains from a small causal LM with a KV pool of its own. vocab: the tokens that it
    drafts, whose rows of the LM head are copied; None: all.

    tail_B2 holds each row's last two tokens, the second one pending. The first draft call feeds
    both: that brings the KV up to date whatever was accepted (a kept leaf was never fed).
    """

    kind = "lm"
    follows = False  # keys of tokens that came by undrafted rounds would be missing
    held: tuple[str, ...] = ("pool", "tail_B2", "slot_BN")

    def __init__(
        self, model: PreTrainedModel, vocab_size: int, vocab: DraftVocab | None = None
    ) -> None:
        self.runner = Runner(model, vocab_size, vocab=vocab)
        self.context = context_of(model)
        self.vocab = vocab or DraftVocab.whole(output_head(self.runner.model)[1].shape[0])

    @property
    def size(self) -> ModelSize:
        return ModelSize.of(self.runner)

    def reset(self, rows: int, slots: int) -> None:
        self.pool = self.runner.pool(rows, slots)
        self.tail_B2 = torch.zeros(rows, 2, dtype=torch.int64, device=self.runner.device)
        self.slot_BN: Tensor | None = None  # where the last round's nodes were fed, beyond lens

    def prefill(self, admitted: Admitted) -> None:
        rows_R, tokens_RN, lens_R = admitted.rows_R, admitted.tokens_RN, admitted.lens_R
        self.pool.clear(rows_R)
        self.runner.prefill(self.pool, rows_R, tokens_RN, lens_R)
        last_R = tokens_RN.gather(1, lens_R[:, None] - 1)[:, 0]
        self.tail_B2[rows_R] = torch.stack([last_R, admitted.pending_R], 1)

    def propose(self, request: Round) -> TokenTree:
        tree, self.slot_BN = grow(request, self.feed(request))
        return tree

    def feed(self, request: Round) -> Feed:
        width = min(round_up(request.top + request.plan.slots), self.pool.slots)
        return lambda frontier: self._fed(request, frontier, width)

    def extend(self, kept: Kept) -> None:
        known_B = torch.cat([self.tail_B2, kept.tokens_BL], 1)
        at_B2 = kept.n_new_B[:, None] + torch.arange(2, device=known_B.device)
        self.tail_B2.copy_(known_B.gather(1, at_B2))
        if (source_BL := kept.path_BL) is not None:
            if self.slot_BN is not None:
                source_BL = self.slot_BN.gather(1, source_BL)
            target_L = torch.arange(source_BL.shape[1], device=source_BL.device)
            first_B1 = kept.lens_B[:, None]
            self.pool.commit(first_B1 + source_BL, first_B1 + target_L)

    def teacher_logits(self, ids_BT: Tensor, taps_BTU: Tensor | None = None) -> Tensor:
        """Its own law of the next token; it reads no states."""
        hidden_BTH = self.runner.body(input_ids=ids_BT, use_cache=False).last_hidden_state
        return self.runner.logits(hidden_BTH)

    @property
    def parameter_bytes(self) -> int:
        """`weights_read`, of the LM head the rows of the tokens that it drafts."""
        unread = self.vocab.size - len(self.vocab.ids_D)
        return weights_read(self.runner.model) - unread * self.runner.head.weight[0].nbytes

    def _fed(self, request: Round, frontier: Frontier, width: int) -> Fed:
        tokens_BN, lens_B1 = frontier.tokens_BF, request.lens_B[:, None]
        fed = tokens_BN.shape[1]
        if frontier.depth:
            at_BN, slots_BN, seen = frontier.placed(lens_B1, width)
        else:  # the tail
            tokens_BN = self.tail_B2
            at_BN = slots_BN = lens_B1 + torch.arange(-1, 1, device=lens_B1.device)
            seen = Seen(at_BN[:, 0], width)
        hidden_BNH, _ = self.runner.verify(self.pool, tokens_BN, at_BN, slots_BN, seen)
        hidden_BFH = hidden_BNH[:, -fed:]
        return Fed(self.runner.logits(hidden_BFH), hidden_BFH)


def weights_read(model: PreTrainedModel) -> int:
    """Bytes of weights a one-token forward reads; a tied table counts once, as the LM head."""
    embedding, head = model.get_input_embeddings().weight, output_head(model)[1]
    assert isinstance(embedding, Tensor)
    total = sum(map(bytes_read, model.parameters()))
    return total if head is embedding else total - embedding.nbytes
