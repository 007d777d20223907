"""Rounds recorded as CUDA graphs, and replayed."""

import warnings
from collections import Counter

from draftsmith.decode.engine.round import DecodeBatch, Record, Run, Stepper
from draftsmith.decode.engine.rows import Told
from draftsmith.decode.forward.runner import WARM_UP, CudaRecorder
from draftsmith.decode.sampling import RowParams
from draftsmith.decode.tree_shapes import Plan

SMALLEST = 256  # slots that a recorded round attends to
MOST = 128  # recordings kept
Key = tuple[Plan | None, int, tuple[float, ...], int | None, str]


class Graphs:
    """Rounds captured as CUDA graphs, of one batch at a time: one launch a round instead of
    thousands. One for each (tree, attended slots, sampling, form of the drafter); slots are rounded
    up to a power of two. recorder: by default CUDA's. steady: whether the last round ran as all
    like it will.
    """

    steady = True

    def __init__(self, stepper: Stepper, recorder: Record | None = None) -> None:
        self.stepper, self.recorder = stepper, recorder
        self.forget()

    def forget(self) -> None:
        """Drop every recording, and the batch whose tensors they hold."""
        self.batch: DecodeBatch | None = None
        self.runs: Counter[Key] = Counter()
        self.recordings: dict[Key, Run] = {}
        self.record: Record | None = None

    def step(self, batch: DecodeBatch, plan: Plan | None, top: int) -> Told:
        """One round, replayed where it has been recorded."""
        if batch is not self.batch:
            self.forget()
            # A pool of memory of its own: the last one ends with its last recording.
            self.batch, self.record = batch, self.recorder or CudaRecorder()
        top = max(SMALLEST, 1 << (top - 1).bit_length())
        form = "" if self.stepper.drafter is None else self.stepper.drafter.form
        key = (plan, top, batch.params.law, batch.listed, form)

        def run() -> Told:
            return self.stepper.step(batch, plan, top, None)

        self.steady = True
        if isinstance(batch.params, RowParams) or batch.grammars is not None:
            return run()  # as many recordings as mixtures would be more than are ever replayed
        if key not in self.recordings:
            self.steady = self.record is None
            self.runs[key] += 1
            if self.runs[key] <= WARM_UP or self.record is None:
                return run()
            if len(self.recordings) >= MOST:
                self.recordings.pop(next(iter(self.recordings)))
            try:
                self.recordings[key] = self.record(run)
            except RuntimeError as error:
                # Some models read the device in their forward pass (experts chosen by `nonzero`).
                reason = str(error).splitlines()[0]
                warnings.warn(f"rounds run uncaptured: {reason}; fast=false says so", stacklevel=2)
                self.record = None
                return run()
        return self.recordings[key]()
