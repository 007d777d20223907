"""CUDA graphs: a call is recorded once and replayed."""

from collections.abc import Callable
from typing import Any

import torch

WARM_UP = 2  # rounds of each kind run as they are first: they choose kernels and fill caches


class CudaRecorder:
    """Captures into CUDA graphs that share one pool of memory. What a recording reads must outlive
    it: a batch, its decoder and its drafter do.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Any]) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            told = run()

        def replay() -> Any:
            graph.replay()
            return told

        return replay
