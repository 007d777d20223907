"""The round as one piece: nothing in it reads the device, and its recording is itself."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rounds import MODES, reads_nothing, records, started
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import LONGER, PROMPTS

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.graphs import SMALLEST, Graphs
from draftsmith.decode.engine.round import DecodeBatch
from draftsmith.decode.engine.rows import Told
from draftsmith.decode.policies.policy import Policy
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.tree_shapes import Plan

WAYS = dict(zip(("greedy", "t1", "filtered"), LONGER, strict=True))


def grid(*fast: tuple[str, str], ways: tuple[str, ...]) -> list[Any]:
    """Every mode with every way to sample; those that share each half with a fast one are slow."""
    modes = dict.fromkeys(mode for mode, _ in fast)
    pairs = [(mode, way) for mode in modes for way in ways]
    slow = [pytest.param(*one, marks=pytest.mark.slow) for one in pairs if one not in fast]
    return [*fast, *slow]


READ = [("chain", way) for way in WAYS] + [(mode, "t1") for mode in list(MODES)[1:]]
READ += [("static", "greedy"), ("dynamic", "greedy")]
RECORDED = [("chain", "greedy"), ("static", "t1"), ("dynamic", "t1")]


@pytest.mark.parametrize(("mode", "way"), grid(*READ, ways=tuple(WAYS)))
def test_a_round_never_reads_the_device(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    mode: str,
    way: str,
) -> None:
    """Fake tensors have no values: `.item()`, `nonzero` and the like raise."""
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=4, **MODES[mode])
    reads_nothing(decoder, started(decoder, WAYS[way]))


def test_a_policy_that_asks_after_each_call_does_read_it(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """The check above can fail."""
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, policy="confidence")
    batch = started(decoder, LONGER[0]).batch
    read = (DataDependentOutputException, DynamicOutputShapeException)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(read):
        decoder.stepper.step(batch, decoder.policy.next_plan(), 64, decoder.policy)


@pytest.mark.parametrize(("mode", "way"), grid(*RECORDED, ways=("greedy", "t1")))
def test_a_recorded_round_is_the_round(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    mode: str,
    way: str,
) -> None:
    """Recorded once for each kind and replayed on the same tensors, read one round late, over two
    calls whose rows come and go: the same tokens. The recorder stands in for CUDA's: what it
    records is the list of tensor operations, so whatever the host decided is frozen in it.
    """
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    records((tiny_target, tiny_tokenizer), drafter, WAYS[way], new=40, **MODES[mode])


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_a_round_looks_at_every_committed_slot(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    late: bool,
) -> None:
    """`top` is at least the longest row's length, as the device has it, also where the host has not
    heard of the last round; and at most a round more.
    """
    drafter = LMDrafter(tiny_target, len(tiny_tokenizer))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=2, K=4)
    decoder.late, step, seen = late, decoder.stepper.step, []

    def spied(batch: DecodeBatch, plan: Plan | None, top: int, policy: Policy | None) -> Told:
        longest = int(torch.where(batch.rows.active_B, batch.rows.lens_B, 0).max())
        seen.append(top - longest)
        return step(batch, plan, top, policy)

    decoder.stepper.step = spied
    decoder.generate(PROMPTS, LONGER[0])
    rounds = [over for over in seen if over < 50]  # a late one may find all its rows at rest
    assert min(rounds) == 0 and max(rounds) <= 5 * late and len(rounds) > 10


@pytest.mark.parametrize("top", [1, 255, 256, 257, 300, 512, 513])
def test_a_recording_looks_at_every_committed_slot(top: int) -> None:
    """Slots are rounded up to a power of two, at least `SMALLEST`."""
    asked = []
    stepper = SimpleNamespace(drafter=None, step=lambda batch, plan, top, policy: asked.append(top))
    batch = SimpleNamespace(params=SamplingParams(), listed=None, grammars=None)
    Graphs(stepper, lambda run: run).step(batch, None, top)
    assert asked[0] >= max(top, SMALLEST) and asked[0] < max(2 * top, SMALLEST + 1)
    assert asked[0].bit_count() == 1


def test_state_is_changed_in_place(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=4)
    session = started(decoder, LONGER[1])
    batch = session.batch

    def places() -> dict[str, int]:
        held = {**vars(batch.rows), **vars(drafter), **vars(batch.pool)}
        return {k: v.data_ptr() for k, v in held.items() if isinstance(v, torch.Tensor)}

    before = places()
    assert len(before) > 8
    session.hear(session.launch())
    assert places() == before
