"""Rounds of every mode, started and recorded."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, truths

from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.graphs import Graphs
from draftsmith.decode.engine.round import Run
from draftsmith.decode.engine.rows import Told
from draftsmith.decode.engine.session import Session
from draftsmith.decode.sampling import SamplingParams

MODES = {
    "chain": {},
    "static": {"tree": "eagle-25"},
    "dynamic": {"tree": "dynamic:3,3,9"},
    "block": {"rule": "block"},
    "recursive": {"rule": "recursive", "tree": "eagle-25"},
    "traversal": {"rule": "traversal", "tree": "eagle-25", "K": 2},
    "typical": {"lossy": "typical", "allow_lossy": True},
    "split": {"attention": "split", "tree": "eagle-25"},
}


def started(decoder: Decoder, params: SamplingParams) -> Session:
    session = decoder._open(PROMPTS, params, None)
    session.admit()
    session.hear(session.launch())
    return session


def reads_nothing(decoder: Decoder, session: Session) -> None:
    """The next round of a session, which must not read the device: fake tensors have no values,
    so that `.item()`, `nonzero` and the like raise.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        told = decoder.stepper.step(session.batch, decoder.policy.next_plan(), 64, None)
    rows = len(session.batch.rows.requests)
    assert told.table.shape == (rows, 2 * (told.levels + 1) + 4)


def records(
    pair: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    drafter: Drafter,
    params: SamplingParams,
    new: int = 10,
    **how: Any,
) -> None:
    """A recorded round is the round: replayed on the same tensors and read one round late, over two
    calls of so many tokens whose rows come and go, it gives the plain answers.
    """
    decoder = Decoder(*pair, drafter, batch_size=2, **how)
    decoder.late = True
    recordings = record_rounds(decoder)
    expected = [answer[:new] for answer in truths(*pair, params)]
    for _ in range(2):
        done = decoder.generate(PROMPTS, replace(params, max_new_tokens=new))
        assert [c.tokens for c in done] == expected
    assert len(recordings) == 1


def record_rounds(decoder: Decoder) -> list[torch.fx.GraphModule]:
    """From now on the decoder records its rounds; returns the list of recordings, empty as yet."""
    recordings: list[torch.fx.GraphModule] = []

    def record(run: Run) -> Run:
        assert decoder._batch is not None
        rows, drafter = decoder._batch.rows, decoder.drafter
        state = [rows.lens_B, rows.pending_B, rows.rounds_B, rows.room_B, rows.active_B]
        state += [t for t in vars(drafter).values() if isinstance(t, torch.Tensor)]
        pools = [getattr(drafter, "pool", None), decoder._batch.pool]
        state += [pool.kv_2LBSHE for pool in pools if pool is not None]
        shape = {}

        def table() -> torch.Tensor:
            told = run()
            shape.update(levels=told.levels, nodes=told.nodes, said=told.said)
            return told.table

        with torch.inference_mode():
            before = [tensor.clone() for tensor in state]
            with patch.object(proxy_tensor, "extract_val", lambda val, **_: None):
                traced = make_fx(table)()  # no fake copy of each value, which no replay reads
            for tensor, was in zip(state, before, strict=True):
                tensor.copy_(was)
        recordings.append(traced)

        def replay() -> Told:
            with torch.inference_mode():
                return Told(traced(), **shape)

        return replay

    decoder.graphs = Graphs(decoder.stepper, record)
    return recordings
