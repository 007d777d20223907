"""A standalone draft language model as the drafter.

Shapes: B rows, L tokens of a kept path, N prompt tokens or nodes, F nodes fed, V vocabulary.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafters.base import ANY_DEPTH, Admitted, Fed, Feed, Frontier, Kept, Round
from draftsmith.decode.drafters.grow_tree import grow
from draftsmith.decode.forward.runner import Runner, Seen, context_of, round_up
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.scorers import Scored
from draftsmith.models.taps import Tap
from draftsmith.models.target import output_head
from draftsmith.models.vocab import DraftVocab


class LMDrafter:
    """Trees and chains from a small causal LM with a KV pool of its own.

    tail_B2 holds each row's last two tokens, the second one pending. The first draft call feeds
    both: that brings the KV up to date whatever was accepted (a kept leaf was never fed).

    vocab: the tokens that it drafts, whose rows of the LM head are copied; None: all. Decoding
    stays lossless.
    """

    kind = "lm"
    trees = samples = True
    taps: tuple[Tap, ...] = ()
    levels = ANY_DEPTH
    acceptance: Scored | None = None
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

    def release(self) -> None:
        self.__dict__.pop("pool", None)
        self.slot_BN = None

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
        if kept.path_BL is not None:
            source_BL = kept.path_BL
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
        """Bytes of the weights one draft call reads: everything but an untied embedding table, and
        of the LM head the rows of the tokens that it drafts.
        """
        row_H = self.runner.head.weight[0]
        unread = self.vocab.size - len(self.vocab.ids_D)
        return weights_read(self.runner.model) - unread * row_H.numel() * row_H.element_size()

    def _fed(self, request: Round, frontier: Frontier, width: int) -> Fed:
        if frontier.block is None:
            # The tail at first, then one token after another: a chain as far as it goes.
            length = 2 if frontier.depth == 0 else 1
            tokens_BN = frontier.tokens_BF if frontier.depth else self.tail_B2
            first_B = request.lens_B + (frontier.depth + 1 - length)
            at_BN = first_B[:, None] + torch.arange(length, device=first_B.device)
            seen = Seen(first_B, width)
            states = self.runner.verify(self.pool, tokens_BN, at_BN, at_BN, seen)
            last_B1H = states.hidden_BNH[:, -1:]
            return Fed(self.runner.logits(last_B1H), last_B1H)
        slots_BF = request.lens_B[:, None] + frontier.slot_F
        positions_BF = (request.lens_B[:, None] + frontier.depth).expand_as(slots_BF)
        seen = Seen(request.lens_B, width, frontier.block, frontier.depth_M)
        states = self.runner.verify(self.pool, frontier.tokens_BF, positions_BF, slots_BF, seen)
        return Fed(self.runner.logits(states.hidden_BNH), states.hidden_BNH)


def weights_read(model: PreTrainedModel) -> int:
    """Bytes of weights a one-token forward reads. An embedding row is negligible; a tied table
    counts once, as the LM head.
    """
    embedding, head = model.get_input_embeddings().weight, output_head(model)[1]
    assert isinstance(embedding, Tensor)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return total if head is embedding else total - embedding.numel() * embedding.element_size()
