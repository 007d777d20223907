"""Rounds captured as CUDA graphs: one launch a round instead of thousands.

A round reads nothing from the device and changes its state in place, so a recording of it can be
replayed on the same tensors. One recording for each (tree, attended slots, sampling): the slots are
rounded up to a power of two, so that there are few.
"""

from collections import Counter
from collections.abc import Callable

import torch

from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.step import Batch, Stepper, Told
from draftsmith.decode.tree_plan import Plan

WARM_UP = 2  # rounds of each kind run as they are first: they choose kernels and fill caches
SMALLEST = 256  # slots
MOST = 64  # recordings kept

Key = tuple[Plan | None, int, SamplingParams]
Round = Callable[[], Told]


class Graphs:
    """Runs the rounds of one batch; `record` turns a round into its recording, not running it."""

    def __init__(self, stepper: Stepper, record: Callable[[Round], Round] | None = None) -> None:
        self.stepper = stepper
        self.record = record if record is not None else CudaRecorder()
        self.batch: Batch | None = None
        self.runs: Counter[Key] = Counter()
        self.recordings: dict[Key, Round] = {}

    def step(self, batch: Batch, plan: Plan | None, top: int) -> Told:
        """One round, replayed where it has been recorded."""
        if batch is not self.batch or len(self.recordings) > MOST:
            self.batch, self.runs, self.recordings = batch, Counter(), {}
        top = max(SMALLEST, 1 << (top - 1).bit_length())
        key = (plan, top, batch.params)

        def run() -> Told:
            return self.stepper.step(batch, plan, top, None)

        if key not in self.recordings:
            self.runs[key] += 1
            if self.runs[key] <= WARM_UP:
                return run()
            self.recordings[key] = self.record(run)
        return self.recordings[key]()


class CudaRecorder:
    """Captures into CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Round) -> Round:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            told = run()

        def replay() -> Told:
            graph.replay()
            return told

        return replay
