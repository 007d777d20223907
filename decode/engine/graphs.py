"""Rounds captured as CUDA graphs: one launch a round instead of thousands.

A round reads nothing from the device and changes its state in place, so its recording can be
replayed. One for each (tree, attended slots, sampling): slots are rounded up to a power of two.
"""

import warnings
from collections import Counter
from collections.abc import Callable

from draftsmith.decode.engine.round import DecodeBatch, Stepper, Told
from draftsmith.decode.forward.recording import WARM_UP, CudaRecorder
from draftsmith.decode.sampling import RowParams
from draftsmith.decode.tree_shapes import Plan

SMALLEST = 256  # slots
MOST = 128  # recordings kept
Key = tuple[Plan | None, int, tuple[float, ...]]
Round = Callable[[], Told]
Record = Callable[[Round], Round]  # a round -> its recording; doesn't run it


class Graphs:
    """Runs the rounds of one batch at a time. recorder: by default CUDA's."""

    def __init__(self, stepper: Stepper, recorder: Record | None = None) -> None:
        self.stepper, self.recorder = stepper, recorder
        self.forget()

    def forget(self) -> None:
        """Drop every recording, and the batch whose tensors they hold."""
        self.batch: DecodeBatch | None = None
        self.runs: Counter[Key] = Counter()
        self.recordings: dict[Key, Round] = {}
        self.record: Record | None = None

    def step(self, batch: DecodeBatch, plan: Plan | None, top: int) -> Told:
        """One round, replayed where it has been recorded."""
        if batch is not self.batch:
            self.forget()
            # A pool of memory of its own: the last one ends with its last recording.
            self.batch, self.record = batch, self.recorder or CudaRecorder()
        top = max(SMALLEST, 1 << (top - 1).bit_length())
        key = (plan, top, batch.params.law)

        def run() -> Told:
            return self.stepper.step(batch, plan, top, None)

        if isinstance(batch.params, RowParams):
            return run()  # as many recordings as mixtures would be more than are ever replayed
        if key not in self.recordings:
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
