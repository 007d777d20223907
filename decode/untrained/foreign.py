"""A draft LM of another tokenizer (Timor et al., arXiv 2502.05202).

    tli:FOLDER     token-level intersection: its law over the tokens that both have
    slem:FOLDER    string-level exact match: it drafts text, the target's tokenizer makes tokens

    q(t) = exp z_{d(t)} / sum over mapped t' of exp z_{d(t')};  0 of a target's token t without a d

with z the draft's logits and d(t) its token of the same bytes. Tokenizers work on the host: a round
reads the device, and none is recorded. It is meant for CPUs first.

Shapes: B rows, R of them just admitted, N tokens fed, F nodes fed, K draft calls, T tokens of a
text, H hidden, V vocabulary of the target, D of the draft.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafting.base import (
    Admitted,
    Drafter,
    Fed,
    Feed,
    Frontier,
    Kept,
    Round,
    picked,
)
from draftsmith.decode.drafting.grow_tree import grow
from draftsmith.decode.forward.product import VocabHead
from draftsmith.decode.forward.runner import Runner, Seen, round_up
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.token_tree import DETERMINISTIC, TokenTree, chain
from draftsmith.decode.untrained.own_layers import part_bytes
from draftsmith.models.target import output_head
from draftsmith.models.tokenizer import vocab_size
from draftsmith.models.vocab_map import Spelling, VocabMap

NEAR = 16  # bytes of text that tokens are made after
LONG = 64  # bytes whose tokens may still change


@dataclass
class OwnText:
    """A row's text in the draft's tokens. ids: those that stay; rest: bytes after them; before: the
    last bytes that they stand for; fed: tokens with keys and values, of which the first `sure` were
    among ids then.
    """

    ids: list[int] = field(default_factory=list)
    rest: bytearray = field(default_factory=bytearray)
    before: bytes = b""
    fed: list[int] = field(default_factory=list)
    sure: int = 0


class ForeignDrafter(Drafter):
    """Trees and chains in the target's tokens, by a draft's law over those that map. A target's
    token that maps is the draft's own in its context; the text of others is tokenised again. It has
    positions and slots of its own, and of a text that is too long for them it reads the end.

    own, target: the tokenizers. ValueError: no ordinary token is in both.
    """

    kind = "tli"
    host = True
    held: tuple[str, ...] = ("pool", "texts")

    def __init__(
        self,
        model: PreTrainedModel,
        own: PreTrainedTokenizerBase,
        target: PreTrainedTokenizerBase,
    ) -> None:
        self.runner = Runner(model, vocab_size(own))
        self.own, self.target = Spelling(own), Spelling(target)
        self.stretch = max(1, round(self.target.width / self.own.width))
        self.map = VocabMap.of(self.own, self.target)
        self._join(vocab_size(target))

    def _join(self, size: int) -> None:
        """Let the LM head give logits of the target's tokens."""
        if not self.map.ordinary:
            raise ValueError(
                f"drafter tli: got a draft with 0 of the target's {len(self.target.ids)} ordinary "
                f"tokens among its {len(self.own.ids)}, expected at least 1; use slem:FOLDER, "
                "which drafts text, or another draft"
            )
        self.known = self.map.ordinary | self.map.special
        target_M = torch.tensor(sorted(self.known), device=self.runner.device)
        draft_M = torch.tensor([self.known[i] for i in sorted(self.known)]).to(target_M.device)
        self.own_V = torch.zeros(size, dtype=torch.int64, device=self.runner.device)
        self.own_V[target_M] = draft_M
        _, head_DH, bias_D = output_head(self.runner.model)
        bias_M = None if bias_D is None else bias_D[draft_M]
        self.runner.head = VocabHead(head_DH.detach()[draft_M], target_M, size, bias_M)

    @property
    def size(self) -> ModelSize:
        return replace(ModelSize.of(self.runner), stretch=self.stretch, scratch=1)

    @property
    def parameter_bytes(self) -> int:
        model, head = self.runner.model, self.runner.head.weight
        whole = part_bytes(model, self.runner.config.num_hidden_layers, ())
        return whole - output_head(model)[1].nbytes + head.nbytes

    def reset(self, rows: int, slots: int) -> None:
        self.pool = self.runner.pool(rows, slots * self.stretch + 1)
        self.texts = [OwnText() for _ in range(rows)]

    def prefill(self, admitted: Admitted) -> None:
        rows, lens = admitted.rows_R.tolist(), admitted.lens_R.tolist()
        pending = admitted.pending_R.tolist()
        for row, prompt, length, last in zip(
            rows, admitted.tokens_RN.tolist(), lens, pending, strict=True
        ):
            self.texts[row] = OwnText()
            self._take(self.texts[row], [*prompt[:length], last])
        self.pool.clear(admitted.rows_R)
        self._read(rows, 1)

    def extend(self, kept: Kept) -> None:
        new = zip(self.texts, kept.tokens_BL.tolist(), kept.n_new_B.tolist(), strict=False)
        for text, tokens, count in new:
            self._take(text, tokens[:count])

    def _take(self, text: OwnText, tokens: Iterable[int]) -> None:
        """Let a text go on with the target's tokens."""
        for token in tokens:
            said, own = self.target.bytes_of.get(token, b""), self.known.get(token)
            if own is None:
                text.rest += said
            else:
                self._settle(text, len(text.rest))
                text.ids.append(own)
                text.before = (text.before + said)[-NEAR:]
        if len(text.rest) > LONG:
            cut = text.rest.rfind(b" ", 1, -LONG // 2)
            self._settle(text, cut if cut > 0 else len(text.rest) - LONG // 2)

    def _settle(self, text: OwnText, count: int) -> None:
        """Make tokens that stay of so many bytes."""
        said = bytes(text.rest[:count])
        text.ids += self.own.after(text.before, said)
        text.before = (text.before + said)[-NEAR:]
        del text.rest[:count]

    def _ids(self, text: OwnText) -> list[int]:
        return text.ids + self.own.after(text.before, bytes(text.rest)) or [0]

    def _read(self, rows: Sequence[int], slots: int) -> None:
        """Begin anew with rows' texts, with their last half where a round that takes so many slots
        would find no room.
        """
        most = self._most(slots)
        for text in (self.texts[row] for row in rows):
            if len(self._ids(text)) > most:
                self._settle(text, len(text.rest))
                text.ids = text.ids[-(most + 1) // 2 :]
            text.fed, text.sure = self._ids(text), len(text.ids)
        fed = [torch.tensor(self.texts[row].fed, device=self.runner.device) for row in rows]
        lens_R = torch.tensor(list(map(len, fed)), device=self.runner.device)
        tokens_RN = pad_sequence(fed, batch_first=True)
        self.runner.prefill(self.pool, lens_R.new_tensor(rows), tokens_RN, lens_R)

    def _most(self, slots: int) -> int:
        """Tokens that a text may have in such a round; the pool's last slot is nobody's."""
        return max(1, min(self.pool.slots - 1, self.runner.context) - slots)

    def propose(self, request: Round) -> TokenTree:
        return grow(request, self.feed(request))[0]

    def feed(self, request: Round) -> Feed:
        """Its first call feeds what is new of each row's text, of which a tree's nodes may be a
        part: nothing is moved in the pool.
        """
        rows, slots, device = range(len(request.lens_B)), request.plan.slots, self.runner.device
        ids = [self._ids(self.texts[row]) for row in rows]
        if long := [row for row in rows if len(ids[row]) > self._most(slots)]:
            self._read(long, slots)
            ids = [self._ids(self.texts[row]) for row in rows]
        root_B1 = torch.tensor([[len(own) - 1] for own in ids], device=device)
        width = max(*map(len, ids), request.top) + slots
        width = min(round_up(width), self.pool.slots)

        def feed(frontier: Frontier) -> Fed:
            if frontier.depth:
                placed = self.own_V[frontier.tokens_BF], *frontier.placed(root_B1, width)
                hidden_BFH, _ = self.runner.verify(self.pool, *placed)
                return Fed(self.runner.logits(hidden_BFH), hidden_BFH)
            first = [begun(self.texts[row], own) for row, own in zip(rows, ids, strict=True)]
            new = [torch.tensor(own[at:]) for own, at in zip(ids, first, strict=True)]
            tokens_BN = pad_sequence(new, batch_first=True).to(device)
            first_B1 = torch.tensor(first, device=device)[:, None]
            at_BN = first_B1 + torch.arange(tokens_BN.shape[1], device=device)
            # Padding is written over before anything sees it, or goes to the last slot.
            at_BN = at_BN.clamp(max=self.pool.slots - 1)
            seen = Seen(first_B1[:, 0], width)
            hidden_BNH, _ = self.runner.verify(self.pool, tokens_BN, at_BN, at_BN, seen)
            hidden_B1H = picked(hidden_BNH, root_B1 - first_B1)
            return Fed(self.runner.logits(hidden_B1H), hidden_B1H)

        return feed

    def teacher_logits(self, ids_BT: Tensor, taps_BTU: Tensor | None = None) -> Tensor:
        """Of whole texts, in one pass each: of what is tokenised again, as it is at the end."""
        hidden = []
        for tokens in ids_BT.tolist():
            text, at = OwnText(), []
            for token in tokens:
                self._take(text, [token])
                at.append(len(self._ids(text)) - 1)
            own_1N = torch.tensor([self._ids(text)], device=ids_BT.device)
            at_1T = torch.tensor([at], device=ids_BT.device).clamp(max=own_1N.shape[1] - 1)
            hidden.append(picked(self.runner.states(own_1N)[0], at_1T))
        return self.runner.logits(torch.cat(hidden))


def begun(text: OwnText, ids: list[int]) -> int:
    """How many of a text's tokens needn't be fed again, the last one aside; all of them are fed."""
    same = min(text.sure, len(ids) - 1)
    while same < min(len(text.fed), len(ids) - 1) and text.fed[same] == ids[same]:
        same += 1
    text.fed, text.sure = ids, len(text.ids)
    return same


class TextwiseDrafter(ForeignDrafter):
    """Chains of what the target's tokenizer makes of a text: K of the draft's likeliest tokens,
    whatever either vocabulary is. An end of the text, and other tokens that aren't text, are mapped
    as TLI's are.
    """

    kind = "slem"
    trees = samples = False

    def _join(self, size: int) -> None:
        self.known = self.map.special
        self.theirs = {own: token for token, own in self.known.items()}
        self.own_V = torch.arange(self.runner.head.size, device=self.runner.device)

    def propose(self, request: Round) -> TokenTree:
        feed, last_B1, drafted = self.feed(request), request.pending_B[:, None], []
        depth_K = torch.arange(request.plan.levels, device=last_B1.device)
        for depth in range(request.plan.levels):
            frontier = Frontier(depth, last_B1, None, depth_K[depth : depth + 1])
            last_B1 = feed(frontier).logits_BFV.argmax(-1)
            drafted.append(last_B1)
        both = zip(self.texts, torch.cat(drafted, 1).tolist(), strict=False)
        said = [torch.tensor(self._said(*one)[: len(drafted)], dtype=torch.int64) for one in both]
        # The last of them is often cut short: it costs a node, and no token.
        said_BL = pad_sequence(said, batch_first=True).to(last_B1.device)
        tokens_BN = torch.cat([request.pending_B[:, None], said_BL], 1)
        return TokenTree(tokens_BN, chain(said_BL.shape[1], last_B1.device), DETERMINISTIC)

    def _said(self, text: OwnText, drafted: list[int]) -> list[int]:
        """The target's tokens for the draft's, as far as these are text, and what ends it."""
        more, end = b"", []
        for own in drafted:
            if own in self.own.special.values():
                end = [self.theirs[own]] if own in self.theirs else []
                break
            more += self.own.bytes_of.get(own, b"")
        return self.target.after((text.before + text.rest)[-NEAR:], more) + end
