"""Several rounds without a draft in one call of C++ (`rows.cpp`): a small model's take as long in
torch's dispatch and here as a fifth to a half of its pass does.

Shapes: B rows, M rounds, V vocabulary.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.decode.engine.rows import SOURCE, Rows, round_of
from draftsmith.decode.forward.compiled import library
from draftsmith.decode.forward.kv import KVPool
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.sampling import BatchParams, SamplingParams
from draftsmith.decode.token_tree import chain
from draftsmith.models.taps import Tap

MOST = 8  # rounds, of one row
SHARED = 32  # of all rows together: as soon as one has ended, others may take its place
NOISE = 16 << 20  # bytes at most
UNFILTERED = (0, 1.0, 0.0)  # of a law but its temperature


def rounds_at_once(runner: Runner, rows: int, params: BatchParams) -> int:
    """How many rounds one call may make; under 2 where there is no such call."""
    native = runner.native
    if native is None or not native.steps(rows) or library(SOURCE) is None:
        return 0
    most = min(MOST, SHARED // rows) if runner.attention == "masked" else 0
    return most if params.greedy else min(most, NOISE // (4 * rows * runner.head.size))


def several(
    runner: Runner,
    pool: KVPool,
    rows: Rows,
    params: BatchParams,
    race_BMV: Tensor | None,
    most: int,
    width: int,
    taps: Sequence[Tap] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """At most so many rounds, until a row ends: their tables [M, B, 6], lengths before [M, B], and
    the taps' states [M, B, U]. race_BMV: log E at each row's next positions; width: slots that
    cover all that is looked at.
    """
    native, B = runner.native, len(rows.lens_B)
    assert native is not None
    tables_MBX = rows.lens_B.new_empty(most, B, 6)
    before_MB = rows.lens_B.new_empty(most, B)
    side_MBU = pool.kv_2LBSHE.new_empty(most, B, len(taps) * native.hidden)
    logits_BV = torch.empty(B, runner.head.size)
    root, state = chain(0, runner.device), (rows.lens_B, rows.pending_B, rows.rounds_B, rows.room_B)
    given = rows.pending_B[:, None], root.parent, root.depth, logits_BV[:, None], race_BMV
    made_here = rows.active_B, rows.stop_ids_BM, before_MB, tables_MBX, None
    round_, at_2B = round_of((*given, *state, *made_here), 1), rows.lens_B.new_empty(2, B)

    def law(states_BH: Tensor) -> None:
        logits_BV.copy_(params.transform(runner.logits(states_BH)))

    at, head = (rows.pending_B, rows.lens_B, at_2B), runner.head
    where = pool, at, width, side_MBU, taps
    known = isinstance(params, SamplingParams) and params.law[1:] == UNFILTERED
    if known and native.reads_out(head, B):
        step = native.step(*where, head=head, temperature=params.law[0])
    else:
        step = native.step(*where, law=law)
    made = library(SOURCE).several(
        *(ctypes.byref(round_), ctypes.c_int64(most), ctypes.c_int64(runner.context)),
        *(ctypes.c_int64(pool.slots), ctypes.c_void_p(at_2B.data_ptr()), *step.call),
    )
    if step.failed:
        raise step.failed[0]
    return tables_MBX[:made], before_MB[:made], side_MBU[:made]
