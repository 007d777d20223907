"""The target drafts for itself over a small part of its keys and values.

    streaming:BUDGET    the first 4 tokens and the latest others (StreamingLLM, arXiv 2309.17453)
    snapkv:BUDGET       of the prompt its last 32 tokens and, for each layer and key-value head, the
                        slots that their queries weigh most (SnapKV, 2404.14469)

At long contexts and large batches a step reads more keys and values than weights. The draft's are a
view of `budget` slots that never grows; verification reads all (MagicDec, 2408.11049). After a
round the kept tokens' exact entries are copied from the target's pool, so that nothing a draft made
outlives it: by a ring, over the oldest entries but the first 4. Keys keep their rotation and
queries their true position.

Shapes: L layers, B rows, R of them just admitted, N prompt tokens, T tokens of a text, K key-value
heads, S slots, C slots of the view, F nodes fed, M tokens of a kept path.
"""

from dataclasses import replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Admitted, Fed, Feed, Frontier, Kept, Round
from draftsmith.decode.forward.kv import ROOM, KVPool, context_of, ring, round_up, windowed
from draftsmith.decode.forward.runner import Seen
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.untrained.own_layers import OwnLayersDrafter

SINKS = 4
WATCHED = 32  # the prompt's last tokens, whose queries choose
POOLED = 5  # neighbours that a slot's weight is averaged over
LEAST = {"streaming": 2 * SINKS, "snapkv": WATCHED + 2 * SINKS}


class PartialKVDrafter(OwnLayersDrafter):
    """Trees and chains from all of the target's layers, which see `budget` slots and the drafted
    path. ValueError for a target with windows, whose masks take a slot for its position.
    """

    room, native = ROOM, None
    held: tuple[str, ...] = ("pool", "view", "shift_B")

    def __init__(self, kind: str, target: PreTrainedModel, vocab_size: int, budget: int) -> None:
        config = target.config.get_text_config()
        if windowed(config):
            raise ValueError(
                f"drafter: got {kind}:{budget} with a target that has sliding windows, expected "
                "full attention in every layer: windows keep little already; use another drafter"
            )
        super().__init__(kind, target, vocab_size, config.num_hidden_layers, set())
        self.budget = budget
        self.levels = budget - SINKS - 1  # a round's kept tokens must fit into the ring

    @classmethod
    def named(cls, kind: str, says: str, target: PreTrainedModel, vocab_size: int) -> Self:
        """streaming:BUDGET or snapkv:BUDGET; ValueError for anything else."""
        most = context_of(target)
        if not says.isdecimal() or not LEAST[kind] <= int(says) <= most:
            raise ValueError(
                f"drafter: got {kind}:{says}, expected {kind}:BUDGET with {LEAST[kind]} slots to "
                f"{most}, the target's context"
            )
        return cls(kind, target, vocab_size, int(says))

    @property
    def size(self) -> ModelSize:
        return replace(ModelSize.of(self.runner), window=self.budget, scratch=ROOM)

    def reset(self, rows: int, slots: int) -> None:
        self._begin(self.runner.pool(rows, slots), slots)

    def share(self, pool: KVPool) -> None:
        self._begin(pool, ROOM)

    def _begin(self, pool: KVPool, room: int) -> None:
        self.pool = pool
        self.view = self.runner.pool(pool.rows, self.budget + room)
        # Token number i of a row's view stands at position i + shift.
        self.shift_B = torch.zeros(pool.rows, dtype=torch.int64, device=self.runner.device)

    @torch.inference_mode()
    def prefill(self, admitted: Admitted) -> None:
        rows_R, lens = admitted.rows_R, admitted.lens_R.tolist()
        chosen = [
            self._chosen(row, tokens_N[:length])
            for row, tokens_N, length in zip(rows_R.tolist(), admitted.tokens_RN, lens, strict=True)
        ]
        self.view.clear(rows_R)
        self.view.take(self.pool, rows_R, torch.stack(chosen, 1))
        self.shift_B[rows_R] = (admitted.lens_R - self.budget).clamp(min=0)

    def _chosen(self, row: int, tokens_N: Tensor) -> Tensor:
        """Slots [L, C, K] of a prompt, in order; any beyond its end."""
        length, budget = len(tokens_N), self.budget
        layers, heads = self.pool.kv_2LBSHE.shape[1], self.pool.kv_2LBSHE.shape[4]
        at_C = torch.arange(budget, device=tokens_N.device)
        if length <= budget or self.kind == "streaming":
            at_C = at_C + (at_C >= SINKS) * max(length - budget, 0)
            at_C = at_C.clamp(max=self.pool.slots - 1)
            return at_C[:, None].expand(layers, -1, heads)
        last_1M = torch.arange(length - WATCHED, length, device=tokens_N.device)[None]
        seen = Seen(last_1M[:, 0], length)
        pool, tokens_1M = self.pool.part(row, row + 1), tokens_N[None, -WATCHED:]
        _, weights = self.runner.again(pool, tokens_1M, last_1M, seen, "watched")
        weight_LKS = torch.cat(weights)[..., : length - WATCHED]
        weight_LKS = F.avg_pool1d(weight_LKS, POOLED, stride=1, padding=POOLED // 2)
        best_LKC = weight_LKS.topk(budget - WATCHED, -1).indices.sort(-1).values
        last_LKM = last_1M.expand(layers, heads, -1)
        return torch.cat([best_LKC, last_LKM], -1).transpose(1, 2)

    def feed(self, request: Round) -> Feed:
        lens_B1 = request.lens_B[:, None]
        fill_B1 = (lens_B1 - self.shift_B[:, None]).clamp(max=self.budget)
        filled = min(request.top, self.budget) + request.plan.slots
        width = min(round_up(filled), self.view.slots)

        def feed(frontier: Frontier) -> Fed:
            at_BF, slots_BF, seen = frontier.placed(fill_B1, width)
            at_BF = at_BF + (lens_B1 - fill_B1)
            placed = frontier.tokens_BF, at_BF, slots_BF, seen
            states_BFH, _ = self.runner.verify(self.view, *placed)
            return Fed(self.runner.logits(states_BFH), states_BFH)

        return feed

    def extend(self, kept: Kept) -> None:
        step_M = torch.arange(kept.tokens_BL.shape[1], device=self.runner.device)
        from_BM = kept.lens_B[:, None] + step_M
        slots_BM = ring(from_BM - self.shift_B[:, None], self.budget, SINKS)
        # What isn't kept goes where no committed entry is.
        own_BM = step_M < kept.n_new_B[:, None]
        slots_BM = torch.where(own_BM, slots_BM, self.view.slots - 1)
        self.pool.commit(from_BM, slots_BM, self.view)

    @torch.inference_mode()
    def teacher_logits(self, ids_BT: Tensor, taps_BTU: Tensor | None = None) -> Tensor:
        """Of a view of the first and the latest tokens, also for snapkv, whose choice depends on
        where a prompt ends. A token sees its own exact keys, which a draft call has not.
        """
        rows, length = ids_BT.shape
        pool = self.runner.pool(rows, length)
        row_B = torch.arange(rows, device=self.runner.device)
        at_T = torch.arange(length, device=self.runner.device)
        self.runner.prefill(pool, row_B, ids_BT, torch.full_like(row_B, length))
        late_TT = at_T >= at_T[:, None] - (self.budget - SINKS)
        block_TT = (at_T <= at_T[:, None]) & ((at_T < SINKS) | late_TT)
        seen = Seen(torch.zeros_like(row_B), length, block_TT)
        return self.runner.logits(self.runner.again(pool, ids_BT, at_T.expand(rows, -1), seen)[0])
