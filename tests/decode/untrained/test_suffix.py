"""The law of suffix decoding is what a scan over all texts finds; a full store forgets."""

import random
from collections import defaultdict

import pytest
import torch
from looked_up import begun, chain_round, tau, told
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS

from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.drafting.base import Frontier
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.forward.compiled import library
from draftsmith.decode.untrained import suffix
from draftsmith.decode.untrained.suffix import SLACK, Places, SuffixDrafter

CPU = torch.device("cpu")
NONE = property(lambda store: None)  # nothing in C++


@pytest.fixture(params=["torch", "C++"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of the store."""
    if request.param == "torch":
        monkeypatch.setattr(Places, "made", NONE)
    elif library(suffix.SOURCE) is None:
        pytest.skip("no C++ compiler")


def scanned(known: list[list[int]], ending: list[int], path: list[int]) -> dict[int, float]:
    """Weights of what followed the ending and then the path, by a scan over all places."""
    found: dict[int, float] = defaultdict(float)
    for text in known:
        for at in range(1, len(text) - len(path)):
            before = text[:at][::-1]
            alike = zip(before, ending[::-1], strict=False)
            matched = next((i for i, (a, b) in enumerate(alike) if a != b), None)
            matched = min(len(before), len(ending)) if matched is None else matched
            matched = min(matched, suffix.COMPARED)
            if matched and text[at : at + len(path)] == path:
                found[text[at + len(path)]] += 2.0**matched
    return found


def law_at(drafter: SuffixDrafter, row: int, path: list[int]) -> Tensor:
    """What a chain of draft calls along `path` gives in a row."""
    feed, _ = drafter.looked_up()
    rows, one = len(drafter.lens_B), torch.zeros(1, dtype=torch.int64)
    logits_BFV = feed(Frontier(0, one.expand(rows, 1), None, one)).logits_BFV
    for depth, token in enumerate(path, 1):
        tokens_B1 = torch.full((rows, 1), token)
        logits_BFV = feed(Frontier(depth, tokens_B1, None, one + depth)).logits_BFV
    return logits_BFV[row, 0].exp()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("seed", range(3))
def test_the_law_is_what_a_scan_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random texts of three tokens, and tables wide enough to hold every place: texts of both rows
    count, and answers that are over.
    """
    monkeypatch.setattr(suffix, "WIDE", 256)
    draw = random.Random(seed)
    drafter = SuffixDrafter("suffix", CPU, 5, remembered=1000)
    drafter.reset(2, 64)
    texts_B: list[list[int]] = [[], []]
    past: list[list[int]] = []
    begins_B = [6, 6]  # of the answers
    for step in range(24):
        row = draw.randrange(2)
        new = [draw.randrange(3) for _ in range(draw.randint(1, 4))]
        if not texts_B[row] or step == 12:
            if texts_B[row]:
                past.append(texts_B[row][max(0, begins_B[row] - suffix.LED) :])
            prompt = [draw.randrange(3) for _ in range(6)]
            texts_B[row] = [*prompt, draw.randrange(3)]
            begun(drafter, row, texts_B[row])
        else:
            told(drafter, row, new, 2)
            texts_B[row] += new
        path = [draw.randrange(3) for _ in range(draw.randrange(3))]
        weights = scanned([*texts_B, *past], texts_B[row], path)
        expected_V = torch.tensor([weights[v] + SLACK / 5 for v in range(5)])
        torch.testing.assert_close(law_at(drafter, row, path), expected_V)
    assert past, "one answer is over"


@pytest.mark.usefixtures("form")
def test_of_many_places_the_latest_count() -> None:
    """The same token is followed by 1 a hundred times, then by 2 for as often as a table is wide:
    what counts is the end, also where all came in one prompt.
    """
    for at_once in (True, False):
        drafter = SuffixDrafter("suffix", CPU, 5, remembered=1000)
        drafter.reset(1, 1000)
        tokens = [token for _ in range(100) for token in (3, 1)]
        tokens += [token for _ in range(suffix.WIDE) for token in (3, 2)] + [3]
        begun(drafter, 0, tokens if at_once else tokens[:2])
        if not at_once:
            for token in tokens[2:]:
                told(drafter, 0, [token], 1)
        one, two = law_at(drafter, 0, [])[[1, 2]]
        # Of longer endings, 1 is still in the tables: the pair before it was another.
        assert two > 1000 * one


@pytest.mark.usefixtures("form")
def test_places_are_overwritten_in_a_full_store() -> None:
    """Twenty answers in a store for three: the latest are found, the first isn't."""
    drafter = SuffixDrafter("suffix", CPU, 100, remembered=64)
    drafter.reset(1, 32)
    for number in range(20):
        begun(drafter, 0, [number + 50] * 3)
        told(drafter, 0, [*range(10), number + 60], 1)
    begun(drafter, 0, [1, 2, 3, *range(10)])
    law_V = law_at(drafter, 0, [])
    assert law_V[60 + 18] > 100 and law_V[60] < 1


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("answers", [2, 20])
def test_a_store_goes_on_where_it_was_saved(answers: int) -> None:
    """Half empty, or full and begun again: the same law afterwards, and after more answers."""

    def led(drafter: SuffixDrafter, numbers: range) -> Tensor:
        drafter.reset(1, 32)
        for number in numbers:
            begun(drafter, 0, [number + 50] * 3)
            told(drafter, 0, [*range(10), number + 60], 1)
        begun(drafter, 0, [1, 2, 3, *range(10)])
        return law_at(drafter, 0, [])

    first = SuffixDrafter("suffix", CPU, 100, remembered=64)
    led(first, range(answers))
    first.settle()
    stored = {name: part.clone() for name, part in first.stored().items()}
    second = SuffixDrafter("suffix", CPU, 100, remembered=64)
    second.restore(stored)
    for numbers in (range(0), range(20, 21)):
        torch.testing.assert_close(led(second, numbers), led(first, numbers))
    first.settle()
    before = first.stored()["ring_R"].clone()
    first.settle()  # what stands in a row is taken once
    assert first.stored()["ring_R"].equal(before)


def test_the_same_question_again_is_copied(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """And after `forget`, isn't."""
    drafter = load_drafter("suffix", tiny_target, tiny_tokenizer)
    assert isinstance(drafter, SuffixDrafter)
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=2, K=12)
    first, second = (tau(decoder.generate(PROMPTS, SETTINGS[1])) for _ in range(2))
    drafter.forget()
    third = tau(decoder.generate(PROMPTS, SETTINGS[1]))
    assert second > 2 * first and third == first


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.skipif(library(suffix.SOURCE) is None, reason="no C++ compiler")
def test_a_chain_in_one_call_is_the_one_that_torch_grows(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a life of two rows: the tables to the last number, the chains to the last token and
    level, also where a row rests.
    """
    draw, vocab, K = random.Random(1), 7, 6
    pair = [SuffixDrafter("suffix", CPU, vocab, remembered=200) for _ in range(2)]
    monkeypatch.setattr(pair[1].store, "made", None)
    for drafter in pair:
        drafter.reset(2, 80)
    levels = []
    for step in range(60):
        row, rest = step % 2, draw.random() < 0.2
        if step < 2 or draw.random() < 0.1:
            text = [draw.randrange(vocab) for _ in range(8)]
            for drafter in pair:
                begun(drafter, row, text)
        else:
            # What follows is mostly what followed before.
            new = [draw.choice([1, 2, 3]) for _ in range(draw.randint(1, 3))]
            for drafter in pair:
                told(drafter, row, new, 2)
        for name in ("latest_OHW", "counts_OH"):
            own, other = (getattr(drafter.store, name)[:, :-1] for drafter in pair)
            assert own.equal(other), name
        asked = chain_round(pair[0], K, temperature, step=step, rest=rest)
        own, other = (drafter.propose(asked).tokens_BN for drafter in pair)
        assert own.equal(other)
        levels.append(own.shape[1] - 1)
    assert {2, K} <= set(levels), "some have hope for two levels, some to the end"
