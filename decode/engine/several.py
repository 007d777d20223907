"""Several rounds in one call of C++ (`rows.cpp`), without a draft or with chains of a drafter that
is in C++ too: torch's dispatch around them makes a small model's take a quarter to a half longer.

Shapes: B rows, M rounds, N nodes of a round, V vocabulary.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.decode.drafting.base import Kept
from draftsmith.decode.drafting.in_rounds import InRounds
from draftsmith.decode.engine.rows import SOURCE, Rows, round_of
from draftsmith.decode.forward.compiled import library
from draftsmith.decode.forward.kv import KVPool
from draftsmith.decode.forward.native import place
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.sampling import BatchParams, unfiltered
from draftsmith.decode.token_tree import chain
from draftsmith.models.taps import Tap

MOST = 16  # rounds that streamed text waits for: 10 ms of a 15M target's, of one row
SHARED = 64  # of all rows together: as soon as one has ended, others may take its place
NOISE = 16 << 20  # bytes at most


def rounds_at_once(
    runner: Runner, rows: int, params: BatchParams, nodes: int = 1, longest: int = MOST
) -> tuple[int, int]:
    """How many rounds of so many nodes one call may make, under 1 where there is no such call; and
    for how many positions it has noise at most, whose end may end it: what no round reaches would
    be made for nothing. longest: rounds at most.
    """
    native = runner.native
    if native is None or not native.steps(rows * nodes) or library(SOURCE) is None:
        return 0, 0
    most = min(longest, SHARED // rows) if runner.attention == "masked" else 0
    span = most + 2 * (nodes - 1)
    if not params.greedy:
        span = min(span, 2 * MOST, NOISE // (4 * rows * runner.head.size))
    return min(most, span - nodes + 1), span


def several(
    runner: Runner,
    pool: KVPool,
    rows: Rows,
    params: BatchParams,
    race_BMV: Tensor | None,
    reach: tuple[int, int, int],
    drafts: InRounds,
    taps: Sequence[Tap] = (),
) -> tuple[Tensor, list[tuple[int, int]], Tensor, Tensor, list[float]]:
    """Rounds at once, until a row ends: their tables, [M, B (2 N + 4)], in each round's first
    numbers one of [B, 2 l + 4], of l <= N tokens; these, and their nodes; lengths before [M, B],
    the taps' states [M, B, N, U], likewise, and this thread's seconds for each. race_BMV: log E at
    each row's next positions; reach: rounds at most, nodes of each, and slots that cover all that
    these look at.
    """
    native, B, (most, nodes, width) = runner.native, len(rows.lens_B), reach
    assert native is not None
    tables_MBX = rows.lens_B.new_empty(most, B, 2 * nodes + 4)
    before_MB = rows.lens_B.new_empty(most, B)
    side_MBNU = pool.kv_2LBSHE.new_empty(most, B, nodes, len(taps) * native.hidden)
    logits_BNV = torch.empty(B, nodes, runner.head.size)
    tokens_BN = rows.pending_B[:, None] if nodes == 1 else rows.lens_B.new_empty(B, nodes)
    tree = chain(nodes - 1, runner.device)
    given = tokens_BN, tree.parent, tree.depth, logits_BNV, race_BMV
    state = rows.lens_B, rows.pending_B, rows.rounds_B, rows.room_B, rows.active_B
    made_here = rows.stop_ids_BM, before_MB, tables_MBX, None, None, side_MBNU
    round_ = round_of((*given, *state, *made_here), nodes)
    at_2BN = rows.lens_B.new_empty(2, B, nodes)
    sizes_M2, took_M = (ctypes.c_int64 * 2 * most)(), (ctypes.c_double * most)()

    head, bare = runner.head, unfiltered(params) and runner.head.ids_D is None

    def law(states_TH: Tensor) -> None:
        made_TV = head(states_TH) if bare else runner.logits(states_TH)
        if not bare:
            made_TV = params.transform(made_TV.unflatten(0, (B, -1))).flatten(0, 1)
        law_TV = logits_BNV.view(-1, head.size)[: len(made_TV)].copy_(made_TV)
        if bare and params.law[0] not in (0, 1):
            law_TV.div_(params.law[0])

    where = pool, (tokens_BN, rows.lens_B, at_2BN), width, side_MBNU, taps
    if bare and head.ids_D is None and native.reads_out(head):
        step = native.step(*where, head=head, temperature=params.law[0])
    else:
        step = native.step(*where, law=law)
    limits = most, 0 if race_BMV is None else race_BMV.shape[1], runner.context, pool.slots
    made = library(SOURCE).several(
        *(ctypes.byref(round_), *map(ctypes.c_int64, limits)),
        *(place(at_2BN), sizes_M2, took_M, *step.call, *drafts.call),
    )
    if step.failed:
        raise step.failed[0]
    sizes = [(tokens, nodes) for tokens, nodes in sizes_M2[:made]]
    return tables_MBX[:made].flatten(1), sizes, before_MB[:made], side_MBNU[:made], took_M[:made]


def plain_rounds(tables: list[list[int]], rows: int) -> list[tuple[list[int], int]] | None:
    """Of the tables of rounds without a draft, each row's tokens and whether it goes on; None where
    one is broken.
    """
    news = [list[int]() for _ in range(rows)]
    for numbers in tables:
        for row, tokens in enumerate(news):
            token, _, _, n_new, _, bad = numbers[6 * row : 6 * row + 6]
            if bad:
                return None
            tokens += [token] * n_new
    return [(tokens, numbers[6 * row + 4]) for row, tokens in enumerate(news)]


def kept_of(table_X: Tensor, size: tuple[int, int], before_B: Tensor, side_BNU: Tensor) -> Kept:
    """Of one of several rounds, whose numbers stand one after another however few it had."""
    nodes, rows, width = size[0], len(before_B), side_BNU.shape[2]
    table_BX = table_X[: rows * (2 * nodes + 4)].view(rows, -1)
    taps_BLU = side_BNU.flatten()[: rows * nodes * width].view(rows, nodes, width)
    tokens_BL, n_new_B = table_BX[:, :nodes], table_BX[:, 2 * nodes + 1]
    return Kept(tokens_BL, n_new_B, None, before_B, taps_BLU if width else None)
