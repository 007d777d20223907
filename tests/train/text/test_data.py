"""Examples, cutting, packing, and the batches of a step."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from draftsmith.train.text.batches import Batch, Batches, Examples, cut_long, pack


def some_examples(count: int = 40, longest: int = 24, seed: int = 0) -> Examples:
    """Examples whose tokens are all distinct within one, half of them with an untrained prompt."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for i in range(count):
        length = int(torch.randint(2, longest + 1, (1,), generator=generator))
        ids = torch.randint(4, 300, (length,), generator=generator).tolist()
        prompt = length // 2 if i % 2 else 0
        pairs.append((ids, [False] * prompt + [True] * (length - prompt)))
    return Examples.collect(pairs)


def test_examples_come_back_as_they_went_in(tmp_path: Path) -> None:
    examples = Examples.collect([([5, 6, 7], [False, True, True]), ([8], [False])])
    ids, trained = examples.example(0)
    assert ids.tolist() == [5, 6, 7] and ids.dtype == torch.int64
    assert trained.tolist() == [False, True, True]
    assert examples.prompt(0) == [5] and examples.prompt(1) == [8]
    examples.save(tmp_path / "examples.safetensors")
    loaded = Examples.load(tmp_path / "examples.safetensors")
    assert loaded.fingerprint() == examples.fingerprint()
    assert len(loaded) == 2 and loaded.ids.dtype == torch.int32


def test_fingerprint_tells_ids_masks_and_borders_apart() -> None:
    variants = [
        [([1, 2, 3], [True, True, True])],
        [([1, 2, 4], [True, True, True])],
        [([1, 2, 3], [False, True, True])],
        [([1, 2], [True, True]), ([3], [True])],
    ]
    assert len({Examples.collect(pairs).fingerprint() for pairs in variants}) == 4


def test_a_spoiled_file_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "examples.safetensors"
    with pytest.raises(ValueError, match="not a file of saved examples"):
        Examples.load(path)
    some_examples().save(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="not a file of saved examples"):
        Examples.load(path)
    with pytest.raises(ValueError, match="got no examples"):
        Examples.collect([])


def test_documents_become_chunks_and_chats_are_truncated() -> None:
    document = (list(range(10, 20)), [True] * 10)
    chat = (list(range(20, 30)), [False] * 2 + [True] * 8)
    only_prompt = (list(range(30, 40)), [False] * 9 + [True])
    cut = cut_long(Examples.collect([document, chat, only_prompt]), max_length=4)
    assert cut.spans.tolist() == [[0, 4], [4, 8], [8, 10], [10, 14]]
    assert cut.origin.tolist() == [0, 0, 0, 1]
    with pytest.raises(ValueError, match="none of 1 examples has a trained token"):
        cut_long(Examples.collect([only_prompt]), max_length=4)


def test_a_piece_whose_first_token_alone_is_trained_is_dropped() -> None:
    """Nothing predicts a first token: such a row would train nothing."""
    document = (list(range(9)), [True] * 9)
    chat = (list(range(6)), [True, False, False, False, False, True])
    cut = cut_long(Examples.collect([document, chat]), max_length=4)
    assert cut.spans.tolist() == [[0, 4], [4, 8]]


@pytest.mark.parametrize("longest", [1, 7, 64])
def test_bins_hold_everything_once_and_fit(longest: int) -> None:
    generator = torch.Generator().manual_seed(longest)
    lengths = torch.randint(1, longest + 1, (500,), generator=generator).tolist()
    bins = pack(lengths, 64)
    assert sorted(i for bin_ in bins for i in bin_) == list(range(500))
    assert max(sum(lengths[i] for i in bin_) for bin_ in bins) <= 64
    # Best fit with the longest first needs at most 11/9 of the least number of bins, and a bit.
    assert len(bins) <= 11 / 9 * -(-sum(lengths) // 64) + 4


def batches(examples: Examples, batch_size: int = 4, **changes: object) -> Batches:
    settings: dict = dict(max_length=64, seed=3, packing=False, pad_id=1) | changes
    return Batches(examples, batch_size=batch_size, **settings)


def token_losses(model: LlamaForCausalLM, batch: Batch) -> dict[tuple[int, ...], float]:
    """Loss of each trained token, by the document's tokens up to it."""
    with torch.no_grad():
        logits_BTV = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
        ).logits
    log_q_BTV = logits_BTV.log_softmax(-1)
    losses = {}
    for row, place in batch.loss_mask.nonzero().tolist():
        begin = place - int(batch.position_ids[row, place])
        tokens = tuple(batch.input_ids[row, begin : place + 2].tolist())
        losses[tokens] = -float(log_q_BTV[row, place, tokens[-1]])
    return losses


def epoch_losses(model: LlamaForCausalLM, source: Batches, mask: str = "own") -> dict:
    losses: dict[tuple[int, ...], float] = {}
    for step in range(-(-len(source) // source.batch_size)):
        batch = source.batch(step, 0, 0, accumulation=1, world=1)
        if mask == "causal":
            width = batch.input_ids.shape[1]
            causal: Tensor = torch.ones(width, width).tril().bool()
            batch = replace(batch, attention_mask=causal.expand(len(batch.input_ids), 1, -1, -1))
        losses |= token_losses(model, batch)
    return losses


def test_packing_and_padding_give_the_same_loss_token_for_token(
    tiny_target: LlamaForCausalLM,
) -> None:
    examples = some_examples()
    padded = epoch_losses(tiny_target, batches(examples))
    packed = epoch_losses(tiny_target, batches(examples, packing=True))
    expected = sum(int(examples.example(i)[1][1:].sum()) for i in range(len(examples)))
    assert len(padded) == expected
    assert padded.keys() == packed.keys()
    assert max(abs(padded[key] - packed[key]) for key in padded) < 1e-5


def test_without_its_mask_packing_is_wrong(tiny_target: LlamaForCausalLM) -> None:
    examples = some_examples()
    packed = epoch_losses(tiny_target, batches(examples, packing=True))
    leaking = epoch_losses(tiny_target, batches(examples, packing=True), mask="causal")
    assert max(abs(packed[key] - leaking[key]) for key in packed) > 1e-2


@pytest.mark.parametrize("packing", [False, True])
def test_a_token_knows_how_long_its_document_is(packing: bool) -> None:
    """Whatever stands beside it in the row, padding included."""
    examples = some_examples()
    source = batches(examples, packing=packing)
    for step in range(-(-len(source) // source.batch_size)):
        batch = source.batch(step, 0, 0, accumulation=1, world=1)
        assert batch.places is not None
        real = batch.places >= 0
        assert not real.all()
        for place, length in zip(batch.places[real], batch.lengths[real], strict=True):
            [span] = [s for s in source.cut.spans if s[0] <= place < s[1]]
            assert length == span[1] - span[0]


def test_packed_rows_have_one_width_and_masked_borders() -> None:
    source = batches(some_examples(), packing=True)
    batch = source.batch(0, 0, 0, accumulation=1, world=1)
    assert batch.input_ids.shape == (4, 64)
    assert batch.attention_mask is not None
    assert batch.attention_mask.shape == (4, 1, 64, 64)
    assert batch.attention_mask.dtype == torch.bool
    assert batch.attention_mask.any(-1).all(), "a row that may attend nothing gives NaN"
    assert not batch.loss_mask[:, -1].any()
    borders = batch.position_ids[:, 1:] == 0
    assert borders.any() and not batch.loss_mask[:, :-1][borders].any()


def test_rows_of_one_document_need_no_mask() -> None:
    long = Examples.collect([([5] * 60, [True] * 60) for _ in range(4)])
    for packing in (False, True):
        batch = batches(long, packing=packing).batch(0, 0, 0, accumulation=1, world=1)
        assert batch.attention_mask is None
        assert batch.position_ids[0].tolist() == list(range(batch.input_ids.shape[1]))


@pytest.mark.parametrize("packing", [False, True])
def test_an_epoch_holds_every_sequence_once(packing: bool) -> None:
    examples = some_examples(count=48)
    source = batches(examples, batch_size=2, packing=packing)
    assert packing or len(source) == 48
    seen: Counter[int] = Counter()
    for step in range(len(source)):  # two epochs: 2 sequences a step
        seen.update(source.batch(step, 0, 0, accumulation=1, world=1).rows)
    assert set(seen) == set(range(48)) and set(seen.values()) == {2}


def test_how_a_step_is_divided_changes_nothing() -> None:
    source = {size: batches(some_examples(), batch_size=size) for size in (2, 4, 8)}

    def rows_of(step: int, size: int, accumulation: int, world: int) -> list[int]:
        shape = dict(accumulation=accumulation, world=world)
        parts = [
            source[size].batch(step, micro, rank, **shape).rows
            for micro in range(accumulation)
            for rank in range(world)
        ]
        return [row for part in parts for row in part]

    for step in (0, 3, 11):
        whole = sorted(rows_of(step, 8, 1, 1))
        assert len(set(whole)) == 8
        for division in ((2, 4, 1), (2, 2, 2), (4, 1, 2)):
            assert sorted(rows_of(step, *division)) == whole


def test_processes_get_equal_work() -> None:
    """Against the division in the epoch's order: all processes wait for the widest batch."""
    source = batches(some_examples(count=300, longest=60), batch_size=4)
    shape = dict(accumulation=3, world=2)
    dealt_SMR, straight_SMR = [], []
    for step in range(8):
        widths = [
            source.batch(step, micro, rank, **shape).input_ids.shape[1]
            for micro in range(3)
            for rank in range(2)
        ]
        pieces = [piece for [piece] in source.sequences(24 * step, 24)]
        lengths = [int(end - begin) for begin, end in source.cut.spans[pieces]]
        dealt_SMR.append(torch.tensor(widths).view(3, 2))
        straight_SMR.append(torch.tensor(lengths).view(3, 2, 4).amax(2))
    dealt, straight = torch.stack(dealt_SMR), torch.stack(straight_SMR)
    idle = [float((w.amax(2, keepdim=True) - w).sum() / w.sum()) for w in (dealt, straight)]
    assert idle[0] < idle[1] / 2
    assert dealt.amax(2).sum() < 0.75 * straight.amax(2).sum(), "the longest go together"


def test_a_batch_depends_on_step_and_seed_alone() -> None:
    examples = some_examples()
    walked, fresh = batches(examples), batches(examples)
    last = [walked.batch(step, 0, 0, accumulation=1, world=1) for step in range(35)][-1]
    jumped = fresh.batch(34, 0, 0, accumulation=1, world=1)
    assert jumped.rows == last.rows and torch.equal(jumped.input_ids, last.input_ids)
    orders = [
        batches(examples, seed=seed).batch(step, 0, 0, accumulation=1, world=1).rows
        for seed, step in [(3, 0), (4, 0), (3, 10)]  # step 10 begins the second epoch
    ]
    assert len(set(orders)) == 3


def test_rows_name_examples_as_they_were_before_cutting() -> None:
    examples = Examples.collect([([9] * 10, [True] * 10), ([7] * 3, [True] * 3)])
    source = batches(examples, batch_size=4, max_length=4)
    batch = source.batch(0, 0, 0, accumulation=1, world=1)
    assert len(source) == 4 and set(batch.rows) == {0, 1}
    moved = batch.to("meta")
    assert moved.input_ids.device.type == "meta" and moved.rows == batch.rows
