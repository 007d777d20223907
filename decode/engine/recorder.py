"""What is kept of rounds beside the answers.

`Recorder`: what was drafted and what became of it, node by node: the rows that small scorers learn
from (train/scorers.py) and that stopping rules are replayed on (decode/traces/simulate_stops.py).
It reads the device every round: it is for making traces, not for speed.

`Harvest`: what the target knew while it answered, for drafts to learn from. The states of the kept
path are written, on the device, to where their tokens are; nothing is read until a request ends.

Shapes: B rows, R of them just admitted, S slots, N nodes, n = N - 1 of them drafted, C children of
one call, L tokens of a kept path, A answer tokens but the last, T all tokens but the last, H
hidden, U width of the taps, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from draftsmith.decode.drafting.base import Admitted, Call, picked
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.forward.kv import KVPool
from draftsmith.decode.sampling import choose
from draftsmith.decode.token_tree import COUPLED, DETERMINISTIC, TokenTree
from draftsmith.decode.verify.rules import Noise

if TYPE_CHECKING:
    from draftsmith.decode.engine.rows import Rows

Columns = dict[str, Tensor]


class Recorder:
    """Of each drafted node, in columns of equal length:

    round: of its request, from 0; position: absolute, of the node's token; node, parent: numbers in
    the round's tree, 0 the root; depth: from 1; token; log_q, log_p: of the token after its parent,
    transformed; entropy: of q there, nats; lead, path (log q), rank: see `Call`; kept: whether the
    rule keeps it if its parent is kept; on_path: whether all above it were kept; draft_state: the
    state that q was made of; target_state: the target's at the node, after the final norm (bf16).

    keep: called with a prompt's index in the call and its columns, on the CPU, once its request has
    ended without an error.
    """

    def __init__(self, keep: Callable[[int, Columns], None]) -> None:
        self.keep = keep
        self.found: dict[int, list[Columns]] = defaultdict(list)

    def record(
        self,
        rows: "Rows",
        tree: TokenTree,
        calls: Sequence[Call],
        p_logits_BNV: Tensor,
        hidden_BNH: Tensor,
        noise: Noise,
    ) -> None:
        """Take in a round, before it is committed."""
        topology = tree.topology
        assert topology.parents is not None, "recorded trees have one shape for all rows"
        batch, nodes = tree.tokens_BN.shape
        parent_BN = topology.parent.clamp(min=0).expand(batch, -1)
        rows_B1 = torch.arange(batch, device=parent_BN.device)[:, None]
        log_p_BN = p_logits_BNV.log_softmax(-1)[rows_B1, parent_BN, tree.tokens_BN]
        # The root has no call; its column is cut off below.
        log_q_BN = torch.cat([torch.zeros_like(log_p_BN[:, :1]), *(c.log_q_BC for c in calls)], 1)
        if tree.law in (COUPLED, DETERMINISTIC):
            sampled_BN = choose(p_logits_BNV, noise.race_at_nodes(topology))
            kept_BN = tree.tokens_BN == sampled_BN.gather(1, parent_BN)
        else:
            assert noise.accept_BN is not None, "rules by rejection bring their draws"
            kept_BN = noise.accept_BN < (log_p_BN - log_q_BN).exp()
        above_NN = topology.ancestors.tril(-1)  # parents come before their children
        lost_BN = ~(kept_BN | (topology.depth == 0))
        depth_BN = topology.depth.expand(batch, -1)
        columns = {
            "round": rows.rounds_B[:, None].expand(-1, nodes).int(),
            "position": (rows.lens_B[:, None] + depth_BN).int(),
            "node": torch.arange(nodes, device=parent_BN.device).expand(batch, -1).short(),
            "parent": parent_BN.short(),
            "depth": depth_BN.short(),
            "token": tree.tokens_BN.int(),
            "log_q": log_q_BN,
            "log_p": log_p_BN,
            "kept": kept_BN,
            "on_path": ~(above_NN & lost_BN[:, None, :]).any(-1),
            "target_state": hidden_BNH.bfloat16(),
        }
        columns = {name: column[:, 1:] for name, column in columns.items()}
        columns["entropy"] = torch.cat([c.entropy_BF.gather(1, c.of_BC) for c in calls], 1)
        columns["lead"] = torch.cat([c.lead_BC for c in calls], 1)
        columns["path"] = torch.cat([c.joint_BC for c in calls], 1)
        columns["rank"] = torch.cat([c.rank_BC for c in calls], 1).short()
        states = [picked(c.states_BFH, c.of_BC) for c in calls]
        columns["draft_state"] = torch.cat(states, 1).bfloat16()
        # Copies: what is kept must not hold on to a whole round's tensors.
        columns = {name: column.cpu().clone() for name, column in columns.items()}
        active = rows.active_B.tolist()
        for row, request in enumerate(rows.requests):
            if request is not None and active[row]:
                own = {name: column[row] for name, column in columns.items()}
                self.found[request.completion.index].append(own)

    def finish(self, index: int, error: str = "") -> None:
        """A request has ended."""
        found = self.found.pop(index, [])
        if found and not error:
            self.keep(index, {name: torch.cat([c[name] for c in found]) for name in found[0]})


class Harvested(NamedTuple):
    """Of one finished request, on the CPU. norm_AH: the target's states after the final norm at the
    answer's tokens but the last; row i gives the law of answer token i + 1 (the first one is never
    drafted). taps_TU: of all tokens but the last, None for drafters that read no states.
    """

    norm_AH: Tensor
    taps_TU: Tensor | None


class Harvest:
    """The states of the rows of one batch."""

    def __init__(self, pool: KVPool, hidden: int, taps: int) -> None:
        shape, zeros = (pool.rows, pool.slots), pool.kv_2LBSHE.new_zeros
        self.norm_BSH = zeros(*shape, hidden)
        self.taps_BSU = zeros(*shape, taps) if taps else None

    def admit(self, admitted: Admitted) -> None:
        """Take the taps' states at prompts."""
        if self.taps_BSU is not None and admitted.taps_RNU is not None:
            length = admitted.taps_RNU.shape[1]
            self.taps_BSU[admitted.rows_R, :length] = admitted.taps_RNU

    def keep(self, lens_B: Tensor, norm_BLH: Tensor, taps_BLU: Tensor | None) -> None:
        """Take a round's kept path, from position `lens_B` on; later rounds overwrite what lies
        beyond the accepted part.
        """
        at_BL = lens_B[:, None] + torch.arange(norm_BLH.shape[1], device=lens_B.device)
        at_BL = at_BL.clamp(max=self.norm_BSH.shape[1] - 1)
        row_B1 = torch.arange(len(lens_B), device=lens_B.device)[:, None]
        self.norm_BSH[row_B1, at_BL] = norm_BLH
        if self.taps_BSU is not None and taps_BLU is not None:
            self.taps_BSU[row_B1, at_BL] = taps_BLU

    def of(self, row: int, made: Completion) -> Harvested:
        """Copies of what a row holds of the request that has just ended there."""
        first, end = len(made.prompt_tokens), len(made.prompt_tokens) + len(made.tokens) - 1
        taps_TU = None if self.taps_BSU is None else self.taps_BSU[row, :end].to("cpu", copy=True)
        return Harvested(self.norm_BSH[row, first:end].to("cpu", copy=True), taps_TU)
