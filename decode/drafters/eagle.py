"""EAGLE heads as the drafter (Li et al., arXiv 2401.15077, 2406.16858 and 2503.01840).

A row of n committed tokens has been fed the pairs (f_i, x_{i+1}) for i = 0..n-1, the last one with
the pending token: pair i lies in slot i and at rotary position i. Its output there, kept as state,
gives the law of the root's children without another pass; a node at depth k is fed with its
parent's output in the target's place, at position n - 1 + k. After the verdict the kept tokens are
fed again, with the target's own states, over what was drafted there.

Shapes: B rows, N nodes or prompt tokens, L tokens of a kept path, F nodes fed, H hidden, U width of
the taps side by side, D draft vocabulary, V the tokenizer's.
"""

from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.attention import Attend, Seen
from draftsmith.decode.drafters.base import ANY_DEPTH, Admitted, Feed, Frontier, Kept, Round
from draftsmith.decode.growth import grow
from draftsmith.decode.kv import KVPool, SlotCache
from draftsmith.decode.lean import attend
from draftsmith.decode.lean_eagle import EagleBody, lean_eagle
from draftsmith.decode.memory import ModelSize
from draftsmith.decode.product import Product, head_logits
from draftsmith.decode.runner import round_up
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.eagle import Eagle, causal


class EagleDrafter:
    """Trees and chains from an EAGLE-1 or EAGLE-3 head with a KV pool of its own.

    Raises ValueError for a head made for another target (see `Head.bind`), or for a larger
    vocabulary.
    """

    trees = samples = True
    levels = ANY_DEPTH

    def __init__(self, head: Eagle, target: PreTrainedModel, vocab_size: int) -> None:
        self.head = head.bind(target)
        if head.rows < vocab_size:
            raise ValueError(
                f"{head.kind} head: made for {head.rows} tokens, got a tokenizer of {vocab_size}; "
                "expected the target's own"
            )
        self.kind, self.taps, self.context = head.kind, head.taps, head.context
        self.layer, self.vocab_size = head.config.layer, vocab_size
        weight = head.fc.weight
        self.dtype, self.device = weight.dtype, weight.device
        vocab, rows_DH = head.vocab, head.head_DH.detach()
        # Drafted tokens in the tokenizer's order; beyond its size lies padding.
        self.ids_D = None if vocab.is_full else vocab.ids_D.to(self.device)
        kept_DH = rows_DH[:vocab_size] if vocab.is_full else rows_DH
        self.lm_head = Product(kept_DH, None, [head.head_DH])
        self.body: EagleBody = lean_eagle(head) or head

    @property
    def size(self) -> ModelSize:
        # EAGLE-3's first layer reads two states side by side.
        wide = 0 if self.kind == "eagle1" else 2 * self.head.hidden
        return ModelSize(self.layer, self.dtype, beside=wide)

    def reset(self, rows: int, slots: int) -> None:
        self.pool = KVPool(
            self.layer, rows=rows, slots=round_up(slots), dtype=self.dtype, device=self.device
        )
        self.state_BH = torch.zeros(rows, self.head.hidden, dtype=self.dtype, device=self.device)

    def release(self) -> None:
        self.__dict__.pop("pool", None)

    def prefill(self, admitted: Admitted) -> None:
        assert admitted.taps_RNU is not None, "the engine gives what `taps` asks for"
        rows_R, tokens_RN = admitted.rows_R, admitted.tokens_RN
        last_R1 = admitted.lens_R[:, None] - 1
        self.pool.clear(rows_R)
        next_RN = tokens_RN.roll(-1, 1).scatter(1, last_R1, admitted.pending_R[:, None])
        at_RN = torch.arange(tokens_RN.shape[1], device=self.device).expand_as(tokens_RN)
        flat = (rows_R[:, None] * self.pool.slots + at_RN).flatten()
        cache = SlotCache(self.pool, flat, prefix=0)
        output_RNH = self._step(self._fused(admitted.taps_RNU), next_RN, at_RN, cache)
        self.state_BH[rows_R] = _taken(output_RNH, last_R1)[:, 0]

    def propose(self, request: Round) -> TokenTree:
        return grow(request, self.feed(request))[0]

    def feed(self, request: Round) -> Feed:
        width = self._width(request.top + request.plan.slots)
        last_B1 = request.lens_B[:, None] - 1
        outputs_BFH = self.state_BH[:, None]

        def feed(frontier: Frontier) -> Tensor:
            nonlocal outputs_BFH
            if frontier.depth == 0:
                return self._logits(outputs_BFH)
            hidden_BFH = outputs_BFH
            if frontier.of_BF is not None:
                hidden_BFH = _taken(outputs_BFH, frontier.of_BF)
            slots_BF = last_B1 + frontier.slot_F
            at_BF = (last_B1 + frontier.depth).expand_as(slots_BF)
            if frontier.block is None:
                seen = Seen(slots_BF[:, 0], width)
            else:
                seen = Seen(last_B1[:, 0], width, frontier.block, frontier.depth_M)
            hidden_BFH = self.body.fed_back(hidden_BFH)
            outputs_BFH = self._fed(hidden_BFH, frontier.tokens_BF, at_BF, slots_BF, seen)
            return self._logits(outputs_BFH)

        return feed

    def extend(self, kept: Kept) -> None:
        tokens_BL, n_new_B1 = kept.tokens_BL, kept.n_new_B[:, None]
        assert kept.taps_BLU is not None, "the engine gives what `taps` asks for"
        length = tokens_BL.shape[1]
        at_BL = kept.lens_B[:, None] + torch.arange(length, device=self.device)
        seen = Seen(kept.lens_B, self._width(kept.top + length))
        output_BLH = self._fed(self._fused(kept.taps_BLU), tokens_BL, at_BL, at_BL, seen)
        last_BH = _taken(output_BLH, (n_new_B1 - 1).clamp(min=0))[:, 0]
        self.state_BH.copy_(torch.where(n_new_B1 > 0, last_BH, self.state_BH))

    def teacher_logits(self, ids_BT: Tensor, taps_BTU: Tensor) -> Tensor:
        """Step 0 on the target's own states; after the first token, where no pair is whole, 0."""
        at_BT = torch.arange(ids_BT.shape[1] - 1, device=self.device).expand(len(ids_BT), -1)
        fused_BTH = self._fused(taps_BTU[:, :-1])
        output_BTH = self.body.step(fused_BTH, ids_BT[:, 1:], at_BT, causal())
        logits_BTV = self._logits(output_BTH)
        return torch.cat([torch.zeros_like(logits_BTV[:, :1]), logits_BTV], 1)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights one draft call reads: the layers, the LM head's rows, and of EAGLE-1
        the fc, which EAGLE-3 needs for the target's states alone.
        """
        read = [*self.head.layers.parameters(), self.lm_head.weight]
        read += self.head.fc.parameters() if self.kind == "eagle1" else []
        return sum(weight.numel() * weight.element_size() for weight in read)

    def _width(self, slots: int) -> int:
        return min(round_up(slots), self.pool.slots)

    def _fused(self, taps_BNU: Tensor) -> Tensor:
        return self.body.fuse(taps_BNU.to(self.dtype))

    def _fed(
        self, hidden_BNH: Tensor, tokens_BN: Tensor, at_BN: Tensor, slots_BN: Tensor, seen: Seen
    ) -> Tensor:
        """Outputs [B, N, H] for new pairs of rows 0..B-1 at positions `at_BN`, kept in slots."""
        # What lies past the context's end is never kept; it only must not overrun the tables.
        at_BN = at_BN.clamp(max=self.context - 1)
        groups = self.layer.num_attention_heads // self.layer.num_key_value_heads
        attended = Attend(seen, at_BN, groups=groups, dtype=self.dtype, backend="masked")
        cache = SlotCache(self.pool, self.pool.flat(slots_BN), seen.width, attended)
        return self._step(hidden_BNH, tokens_BN, at_BN, cache)

    def _step(
        self, hidden_BNH: Tensor, tokens_BN: Tensor, at_BN: Tensor, cache: SlotCache
    ) -> Tensor:
        return self.body.step(hidden_BNH, tokens_BN, at_BN, partial(attend, cache, None))

    def _logits(self, output_BNH: Tensor) -> Tensor:
        """Raw logits [B, N, V]; -inf for tokens that aren't drafted."""
        state_BNH = self.body.before_head(output_BNH).to(self.lm_head.weight.dtype)
        logits_BND = head_logits(self.lm_head, state_BNH)
        if self.ids_D is None:
            return logits_BND
        shape = (*logits_BND.shape[:-1], self.head.rows)
        logits_BNV = logits_BND.new_full(shape, float("-inf"))
        return logits_BNV.index_copy_(-1, self.ids_D, logits_BND)[..., : self.vocab_size]


def _taken(states_BNH: Tensor, at_BF: Tensor) -> Tensor:
    """The states [B, F, H] at places `at_BF`."""
    return states_BNH.gather(1, at_BF[..., None].expand(-1, -1, states_BNH.shape[2]))
