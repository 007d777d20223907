"""A standalone draft language model as the drafter.

    rapid:BUDGET, rapid:BUDGET+FOLDER    the target itself, or the LM in FOLDER, reads BUDGET tokens
                                         retrieved from a prompt (RAPID, arXiv 2502.20330)

Shapes: B rows, R of them just admitted, M tokens read of a prompt or fed again, L tokens of a kept
path, N prompt tokens or nodes, F nodes fed, W tokens of a tail, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import (
    Admitted,
    Drafter,
    Fed,
    Feed,
    Frontier,
    Kept,
    Round,
)
from draftsmith.decode.drafting.grow_tree import at_once, grow, grow_at_once
from draftsmith.decode.drafting.in_rounds import Draws, InRounds, lm_rounds
from draftsmith.decode.drafting.retrieval import LEAST, retrieved
from draftsmith.decode.forward.kv import context_of, round_up
from draftsmith.decode.forward.native import NativeBody
from draftsmith.decode.forward.product import VocabHead
from draftsmith.decode.forward.runner import Runner, Seen
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.heads.head import ANY_DEPTH
from draftsmith.models.target import bytes_read, output_head
from draftsmith.models.vocab import DraftVocab

COARSE = 256


class LMDrafter(Drafter):
    """Trees and chains from a small causal LM with a KV pool of its own. vocab: the tokens that it
    drafts, whose rows of the LM head are copied; None: all.

    tail_BW holds each row's last two tokens, the second one pending. The first draft call feeds
    both: that brings the KV up to date whatever was accepted (a kept leaf was never fed).

    One that reads only a part of a prompt has positions of its own: a row's are shift_B less than
    the target's, in its keys and values too.
    """

    kind = "lm"
    reads = 0  # tokens of a prompt; 0: all
    tail = 2  # tokens of a row that are known before they are fed, W
    follows = False  # keys of tokens that it hasn't drafted would be missing: see `catch_up`
    owes = True
    held: tuple[str, ...] = ("pool", "tail_BW", "slot_BN", "shift_B", "shifts")

    def __init__(
        self, model: PreTrainedModel, vocab_size: int, vocab: DraftVocab | None = None
    ) -> None:
        self.runner = self.deeper = Runner(model, vocab_size, vocab=vocab)  # after the first call
        self.context = context_of(model)
        self.vocab = vocab or DraftVocab.whole(output_head(self.runner.model)[1].shape[0])

    @classmethod
    def over(
        cls, says: str, own: Drafter | None, target: PreTrainedModel, vocab_size: int
    ) -> "LMDrafter":
        """Of a name's budget, the target itself or the LM of its folder; ValueError for others."""
        own = cls(target, vocab_size) if own is None else own
        fits = says.isdecimal() and int(says) >= LEAST
        if not isinstance(own, LMDrafter) or own.kind != "lm" or not fits:
            raise ValueError(
                f"drafter: got rapid:{says} with a drafter of kind {own.kind}, expected "
                f"rapid:BUDGET or rapid:BUDGET+FOLDER, with at least {LEAST} tokens and the folder "
                "of a draft LM"
            )
        # Beyond a context of its own it drafts badly; the target's alone ends an answer.
        own.kind, own.reads, own.context = "rapid", int(says), ANY_DEPTH
        return own

    @property
    def size(self) -> ModelSize:
        return ModelSize.of(self.runner)

    def reset(self, rows: int, slots: int) -> None:
        self.pool = self.runner.pool(rows, slots)
        self.tail_BW = torch.zeros(rows, self.tail, dtype=torch.int64, device=self.runner.device)
        self.slot_BN: Tensor | None = None  # where the last round's nodes were fed, beyond lens
        # Rows begin as those of a prompt that fills them.
        self.shifts = [max(0, slots - self.reads) * (self.reads > 0)] * rows
        self.shift_B = torch.tensor(self.shifts, device=self.runner.device)

    def prefill(self, admitted: Admitted) -> None:
        rows_R, tokens_RN, lens_R = admitted.rows_R, admitted.tokens_RN, admitted.lens_R
        if self.reads:
            tokens_RN, lens_R = self._read(admitted)
        self.pool.clear(rows_R)
        self.runner.prefill(self.pool, rows_R, tokens_RN, lens_R)
        last_R = tokens_RN.gather(1, lens_R[:, None] - 1)[:, 0]
        self.tail_BW[rows_R, -2:] = torch.stack([last_R, admitted.pending_R], 1)

    def _read(self, admitted: Admitted) -> tuple[Tensor, Tensor]:
        """What it reads of prompts, [R, M], and how much of it [R]."""
        each = zip(admitted.tokens_RN, admitted.lens_R.tolist(), strict=True)
        texts = [retrieved(tokens_N[:length], self.reads) for tokens_N, length in each]
        lens_R = torch.tensor([len(text) for text in texts], device=self.runner.device)
        self.shift_B[admitted.rows_R] = shift_R = admitted.lens_R - lens_R
        for row, shift in zip(admitted.rows_R.tolist(), shift_R.tolist(), strict=True):
            self.shifts[row] = shift
        self.form = str(self._fewer())
        return pad_sequence(texts, batch_first=True), lens_R

    def _fewer(self) -> int:
        """By how many slots less than the target's its rounds see; coarse: it is a `form`."""
        return min(self.shifts) // COARSE * COARSE

    def _own(self, lens_B: Tensor) -> Tensor:
        """Its own committed tokens [B, 1], of rows with so many."""
        return (lens_B - self.shift_B).clamp(min=1)[:, None] if self.reads else lens_B[:, None]

    @property
    def native(self) -> NativeBody | None:
        return self.runner.native

    def propose(self, request: Round) -> TokenTree:
        native, head = at_once(request, self.native, self.runner.head), self.runner.head
        if native is None:
            tree, self.slot_BN = grow(request, self.feed(request), head)
            return tree
        self.slot_BN, lens_B1 = None, self._own(request.lens_B)
        first_BH = self._read_tail(lens_B1, self._width(request))[:, -1]
        where = head, self.pool, self.runner.context
        return grow_at_once(request, native, *where, first_BH, None, lens_B1[:, 0] + 1)

    def in_rounds(self, nodes: int, temperature: float) -> InRounds | None:
        native, head, rows = self.native, self.runner.head, len(self.tail_BW)
        drafts = native and native.drafts(head, rows) and native.steps(2 * rows)
        if native is None or not drafts or self.reads:
            return None
        drawn = Draws(head, temperature, self.pool, self.runner.context)
        return lm_rounds(native, drawn, self.tail_BW)

    def feed(self, request: Round) -> Feed:
        width = self._width(request)
        return lambda frontier: self._fed(request, frontier, width)

    def _width(self, request: Round) -> int:
        """Slots that a round looks at."""
        slots = request.top - self._fewer() + request.plan.slots
        return min(round_up(slots), self.pool.slots)

    def _read_tail(self, lens_B1: Tensor, width: int) -> Tensor:
        """States [B, 2, H] of the last two tokens."""
        at_B2 = lens_B1 + torch.arange(-1, 1, device=lens_B1.device)
        fed = self.tail_BW, at_B2, at_B2, Seen(at_B2[:, 0], width)
        return self.runner.verify(self.pool, *fed)[0]

    def extend(self, kept: Kept) -> None:
        known_BM = torch.cat([self.tail_BW, kept.tokens_BL], 1)
        at_BW = kept.n_new_B[:, None] + torch.arange(self.tail, device=known_BM.device)
        self.tail_BW.copy_(known_BM.gather(1, at_BW))
        if (source_BL := kept.path_BL) is not None:
            if self.slot_BN is not None:
                source_BL = self.slot_BN.gather(1, source_BL)
            target_L = torch.arange(source_BL.shape[1], device=source_BL.device)
            first_B1 = self._own(kept.lens_B)
            self.pool.commit(first_B1 + source_BL, first_B1 + target_L)

    def catch_up(self, kept: Kept) -> None:
        """All but the last two, which the next draft call feeds."""
        tokens_BM = torch.cat([self.tail_BW, kept.tokens_BL], 1)[:, :-2]
        self._take_in(tokens_BM, self._own(kept.lens_B) - 1, kept)
        self.extend(kept)

    def _take_in(self, tokens_BM: Tensor, first_B1: Tensor, kept: Kept) -> None:
        """Make keys and values of tokens from this position on; those past the row's end all go
        where its pending one will be fed.
        """
        end_B1 = self._own(kept.lens_B) + kept.n_new_B[:, None]
        step_M = torch.arange(tokens_BM.shape[1], device=end_B1.device)
        at_BM = torch.minimum(first_B1 + step_M, end_B1)
        reach = kept.top - self._fewer() + 1 + kept.tokens_BL.shape[1]
        width = min(round_up(reach), self.pool.slots)
        self.runner.verify(self.pool, tokens_BM, at_BM, at_BM, Seen(first_B1[:, 0], width))

    def teacher_logits(self, ids_BT: Tensor, taps_BTU: Tensor | None = None) -> Tensor:
        """Its own law of the next token, of whole texts; it reads no states."""
        hidden_BTH = self.runner.body(input_ids=ids_BT, use_cache=False).last_hidden_state
        return self.runner.logits(hidden_BTH)

    @property
    def per_node(self) -> VocabHead | None:
        return self.runner.head

    @property
    def parameter_bytes(self) -> int:
        """`weights_read`, of the LM head the rows of the tokens that it drafts."""
        head, unread = self.runner.head, self.vocab.size - len(self.vocab.ids_D)
        saved = unread * head.weight[0].nbytes + head.weight.nbytes - head.bytes_read
        return weights_read(self.runner.model) - saved

    def _fed(self, request: Round, frontier: Frontier, width: int) -> Fed:
        lens_B1 = self._own(request.lens_B)
        if frontier.depth:
            placed = frontier.tokens_BF, *frontier.placed(lens_B1, width)
            hidden_BFH, _ = self.deeper.verify(self.pool, *placed)
        else:
            hidden_BFH = self._read_tail(lens_B1, width)[:, -1:]
        return Fed(self.runner.logits(hidden_BFH), hidden_BFH)


def weights_read(model: PreTrainedModel) -> int:
    """Bytes of weights a one-token forward reads; a tied table counts once, as the LM head."""
    embedding, head = model.get_input_embeddings().weight, output_head(model)[1]
    assert isinstance(embedding, Tensor)
    total = sum(map(bytes_read, model.parameters()))
    return total if head is embedding else total - embedding.nbytes
