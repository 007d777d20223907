"""A draft LM of another tokenizer (Timor et al., arXiv 2502.05202).

    tli:FOLDER     token-level intersection: its law over the tokens that both have
    slem:FOLDER    string-level exact match: it drafts text, the target's tokenizer makes tokens
    omni+FOLDER    runs of its tokens that spell one of the target's are that one (OmniDraft,
                   2507.02659); omni:FILE+FOLDER begins with what FILE keeps of such runs

    q(t) = exp z_{d(t)} / sum over mapped t' of exp z_{d(t')};  0 of a target's token t without a d

with z the draft's logits and d(t) its token of the same bytes. Tokenizers work on the host: a round
reads the device, and none is recorded. It is meant for CPUs first.

Shapes: B rows, R of them read anew, N tokens fed, F nodes fed, K tokens of a chain, L tokens said,
T tokens of a text, M mapped tokens, V vocabulary of the target, D of the draft.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafting import base
from draftsmith.decode.drafting.base import Admitted, Fed, Feed, Frontier, Kept, Round
from draftsmith.decode.drafting.grow_tree import grow
from draftsmith.decode.forward.kv import round_up
from draftsmith.decode.forward.product import VocabHead
from draftsmith.decode.forward.runner import Runner, Seen
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.token_tree import DETERMINISTIC, TokenTree, chain
from draftsmith.decode.untrained.own_layers import part_bytes
from draftsmith.decode.untrained.texts import StoredDrafter
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.ngram_cache import NgramCache
from draftsmith.models.target import output_head
from draftsmith.models.tokenizer import vocab_size
from draftsmith.models.vocab_map import NEAR, Spelling, VocabMap, whole

LONG = 32  # bytes whose tokens may still change
CALLS = 2  # draft calls for each level of a chain, at most, where tokens are spelled
DEEPEST = 64  # chains for which there are as many slots beside the target's


@dataclass
class OwnText:
    """A row's text in the draft's tokens. ids: those that stay; sure: how many of them have keys
    and values; rest: bytes after them; before: the last bytes that they stand for.
    """

    ids: list[int] = field(default_factory=list)
    sure: int = 0
    rest: bytearray = field(default_factory=bytearray)
    before: bytes = b""


class ForeignDrafter(base.Drafter):
    """Trees and chains in the target's tokens, by a draft's law over those that map. A target's
    token that maps is the draft's own in its context; the text of others is tokenised again. It has
    slots of its own, as many as the target, and of a text that is too long for them it reads the
    end. own, target: the tokenizers. ValueError: no ordinary token is in both.
    """

    kind = "tli"
    host = True
    beside = 0  # slots of a row that the target hasn't
    held: tuple[str, ...] = ("pool", "texts")

    def __init__(
        self,
        model: PreTrainedModel,
        own: PreTrainedTokenizerBase,
        target: PreTrainedTokenizerBase,
    ) -> None:
        self.runner = Runner(model, vocab_size(own))
        self.own, self.target = Spelling(own), Spelling(target)
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
        draft_M = torch.tensor([self.known[i] for i in sorted(self.known)]).to(target_M)
        self.own_V = draft_M.new_zeros(size).index_copy(0, target_M, draft_M)
        _, head_DH, bias_D = output_head(self.runner.model)
        bias_M = None if bias_D is None else bias_D[draft_M]
        self.runner.head = VocabHead(head_DH.detach()[draft_M], target_M, size, bias_M)

    @property
    def size(self) -> ModelSize:
        return ModelSize.of(self.runner)

    @property
    def parameter_bytes(self) -> int:
        model, head = self.runner.model, self.runner.head.weight
        whole = part_bytes(model, self.runner.config.num_hidden_layers, ())
        return whole - output_head(model)[1].nbytes + head.nbytes

    def reset(self, rows: int, slots: int) -> None:
        self.pool = self.runner.pool(rows, slots + self.beside)
        self.texts = [OwnText([0], sure=1) for _ in range(rows)]

    def prefill(self, admitted: Admitted) -> None:
        """It is read in the row's first round."""
        for i, row in enumerate(admitted.rows_R.tolist()):
            prompt = admitted.tokens_RN[i, : admitted.lens_R[i]].tolist()
            self.texts[row] = OwnText()
            self._take(self.texts[row], [*prompt, int(admitted.pending_R[i])])
        self.pool.clear(admitted.rows_R)

    def extend(self, kept: Kept) -> None:
        counts = kept.n_new_B.tolist()
        for text, tokens, count in zip(self.texts, kept.tokens_BL.tolist(), counts, strict=False):
            self._take(text, tokens[:count])

    def _take(self, text: OwnText, tokens: Iterable[int]) -> None:
        """Let a text go on with the target's tokens."""
        for token in tokens:
            said = self.target.bytes_of.get(token, b"")
            if token in self.known:
                self._settle(text, len(text.rest))
                text.ids.append(self.known[token])
                text.before = (text.before + said)[-NEAR:]
            else:
                text.rest += said
        if len(text.rest) > LONG:
            self._settle(text, max(text.rest.rfind(b" ", 1), whole(bytes(text.rest[:-LONG]))))

    def _settle(self, text: OwnText, count: int) -> None:
        """Make tokens that stay of so many bytes."""
        said = bytes(text.rest[:count])
        text.ids += self.own.after(text.before, said)
        text.before = (text.before + said)[-NEAR:]
        del text.rest[:count]

    def _ids(self, text: OwnText) -> list[int]:
        return text.ids + self.own.after(text.before, bytes(text.rest)) or [0]

    def propose(self, request: Round) -> TokenTree:
        return grow(request, self.feed(request))[0]

    def slots(self, request: Round) -> int:
        """That its draft calls fill."""
        return request.plan.slots

    def feed(self, request: Round) -> Feed:
        """Its first call feeds what is new of each row's text, kept nodes of the last tree too:
        nothing is moved in the pool. What was never read, or would find no room, is read anew.
        """
        texts, device = self.texts[: len(request.lens_B)], self.runner.device
        # The last slot is nobody's: padding beyond a row goes there.
        most = min(self.pool.slots - 1, self.runner.context) - self.slots(request)
        for text in texts:
            if len(self._ids(text)) > max(1, most):
                self._settle(text, len(text.rest))
                text.ids, text.sure = text.ids[-max(1, most // 2) :], 0
        ids = [self._ids(text) for text in texts]
        if rows := [row for row, text in enumerate(texts) if not text.sure]:
            fed = [torch.tensor(ids[row], device=device) for row in rows]
            lens_R = torch.tensor(list(map(len, fed)), device=device)
            tokens_RN = pad_sequence(fed, batch_first=True)
            self.runner.prefill(self.pool, lens_R.new_tensor(rows), tokens_RN, lens_R)
        pairs = list(zip(ids, texts, strict=True))
        first = [min(text.sure or len(own), len(own) - 1) for own, text in pairs]
        for text in texts:
            text.sure = len(text.ids)
        new = [torch.tensor(own[at:]) for own, at in zip(ids, first, strict=True)]
        new_BN = pad_sequence(new, batch_first=True).to(device)
        first_B1 = torch.tensor(first, device=device)[:, None]
        root_B1 = torch.tensor([[len(own) - 1] for own in ids], device=device)
        at_BN = first_B1 + torch.arange(new_BN.shape[1], device=device)
        at_BN = at_BN.clamp(max=self.pool.slots - 1)
        width = round_up(max(request.top, *map(len, ids)) + self.slots(request))
        width = min(width, self.pool.slots)

        def feed(frontier: Frontier) -> Fed:
            placed = new_BN, at_BN, at_BN, Seen(first_B1[:, 0], width)
            if frontier.depth:
                placed = self.own_V[frontier.tokens_BF], *frontier.placed(root_B1, width)
            hidden_BFH, _ = self.runner.verify(self.pool, *placed)
            if not frontier.depth:
                hidden_BFH = base.picked(hidden_BFH, root_B1 - first_B1)
            return Fed(self.runner.logits(hidden_BFH), hidden_BFH)

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
            hidden.append(base.picked(self.runner.states(own_1N)[0], at_1T))
        return self.runner.logits(torch.cat(hidden))


class TextwiseDrafter(ForeignDrafter):
    """Chains of what the target's tokenizer makes of the draft's likeliest tokens, whatever either
    vocabulary is: of as many as give K of the target's, at most 2 K. What ends a text, and other
    tokens that aren't text, are mapped.
    """

    kind = "slem"
    trees = samples = False
    beside = (CALLS - 1) * DEEPEST

    def _join(self, size: int) -> None:
        self.known = self.map.special
        self.own_V = torch.arange(self.runner.head.size, device=self.runner.device)

    def slots(self, request: Round) -> int:
        return CALLS * request.plan.levels

    def propose(self, request: Round) -> TokenTree:
        feed, last_B1, levels = self.feed(request), request.pending_B[:, None], request.plan.levels
        drafted: list[Tensor] = []
        said = owns = list[list[int]]()
        asked, ends = request.active_B.tolist(), set(self.own.special.values())
        for call in range(self.slots(request)):
            # The last token may be the beginning of a longer one.
            if call and not any(
                on and len(one) <= levels and not ends.intersection(own)
                for one, own, on in zip(said, owns, asked, strict=True)
            ):
                break
            frontier = Frontier(call, last_B1, None, torch.full_like(last_B1[0], call))
            last_B1 = feed(frontier).logits_BFV.argmax(-1)
            drafted.append(last_B1)
            owns = torch.cat(drafted, 1).tolist()
            said = [self._said(*one) for one in zip(self.texts, owns, strict=False)]
        rows = [torch.tensor(one[:levels], dtype=torch.int64) for one in said]
        said_BL = pad_sequence(rows, batch_first=True).to(last_B1.device)
        tokens_BN = torch.cat([request.pending_B[:, None], said_BL], 1)
        return TokenTree(tokens_BN, chain(said_BL.shape[1], last_B1.device), DETERMINISTIC)

    def _said(self, text: OwnText, drafted: list[int]) -> list[int]:
        """The target's tokens for the draft's, as far as these are text, and what ends it."""
        special, more = {own: token for token, own in self.known.items()}, b""
        for own in drafted:
            if own in self.own.special.values():
                break
            more += self.own.bytes_of.get(own, b"")
        end = [special[own]] if own in special else []
        return self.target.after((text.before + text.rest)[-NEAR:], more) + end


class OmniDrafter(StoredDrafter, TextwiseDrafter):
    """Chains of the target's tokens in the draft's own, a call for each of these, at most 2 K.
    Where d_1 ... d_j may be a token's beginning, the next call says whether they are all of it:

        q(t | d_1 ... d_j) = q(d_{j+1}) share(t | d_1 ... d_{j+1}) of longer ones that begin so
                             1 - their sum                         of the one that ends there

    share: of the tokens seen that begin so. The shared noise of the target's token chooses, as if
    this were a law. A target's token is in the context as its n-gram.
    """

    kind = "omni"

    def _join(self, size: int) -> None:
        super()._join(size)
        self.store = NgramCache(self.own, self.target, size, self.runner.device)
        self.mark = " " + fingerprint(None, self.own.tokenizer)["tokenizer"]

    def remedy(self, path: Path) -> str:
        return "name another file, or none (omni+FOLDER), and it is learned anew"

    def _take(self, text: OwnText, tokens: Iterable[int]) -> None:
        """It learns what is new in them, prompts too."""
        tokens = list(tokens)
        grams, text.before = self.store.spelled(tokens, text.before)
        text.ids += itertools.chain(*grams)
        self.store.count(torch.tensor(tokens, dtype=torch.int64, device=self.runner.device))

    def propose(self, request: Round) -> TokenTree:
        feed, store, last_B1 = self.feed(request), self.store, request.pending_B[:, None]
        row_B = torch.arange(len(last_B1), device=last_B1.device)
        # Of the token that is being spelled: its place in the chain; how many of its own tokens
        # were fed, and their number.
        level_B = fed_B = begun_B = torch.zeros_like(row_B)
        levels = request.plan.levels
        said_BK = torch.zeros(len(row_B), levels + 1, dtype=torch.int64).to(row_B.device)
        for call in range(self.slots(request)):
            frontier = Frontier(call, last_B1, None, torch.full_like(row_B[:1], call))
            log_q_BD = feed(frontier).logits_BFV[:, 0].log_softmax(-1)
            law_BV, whole_B = store.longer(log_q_BD, fed_B, begun_B)
            said_BK[row_B, level_B] = best_B = self._best(request, law_BV, level_B)
            ended_B = (fed_B > 0) & (best_B == whole_B)
            level_B = (level_B + ended_B).clamp(max=levels)
            fed_B = torch.where(ended_B, 0, fed_B)
            if bool(ended_B.any()):
                law_BV, _ = store.longer(log_q_BD, fed_B, begun_B)
                said_BK[row_B, level_B] = best_B = torch.where(
                    ended_B, self._best(request, law_BV, level_B), best_B
                )
            last_B1, begun_B = store.gram_NV[fed_B, best_B][:, None], store.begins_NV[fed_B, best_B]
            fed_B = fed_B + 1
            if bool(((level_B == levels) | ~request.active_B).all()):
                break
        said_BL = said_BK[:, : min(int(level_B.max()) + 1, levels)]
        tokens_BN = torch.cat([request.pending_B[:, None], said_BL], 1)
        return TokenTree(tokens_BN, chain(said_BL.shape[1], tokens_BN.device), DETERMINISTIC)

    def _best(self, request: Round, law_BV: Tensor, level_B: Tensor) -> Tensor:
        """The token that wins with the noise of its place [B]."""
        scores_BV = request.params.transform(law_BV[:, None])[:, 0]
        if request.race_BDV is not None:
            at_B = level_B.clamp(max=request.plan.levels - 1)
            scores_BV = scores_BV - request.race_BDV[torch.arange(len(level_B)), at_B]
        return scores_BV.argmax(-1)
