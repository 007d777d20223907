"""Drafts of edits: the prompt is copied, and found again where an ending stands in it once."""

import random

import pytest
import torch
from looked_up import begun, told
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import SETTINGS, changes_nothing

from draftsmith.decode.drafters.load import has_folder, load_drafter
from draftsmith.decode.drafting.base import Kept, Round
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import DETERMINISTIC
from draftsmith.decode.tree_shapes import chain_plan
from draftsmith.decode.untrained.ngram import NgramDrafter

K = 4


def opened(prompt: list[int], first: int) -> NgramDrafter:
    drafter = NgramDrafter(unique=True)
    drafter.reset(1, 128)
    begun(drafter, 0, [*prompt, first])
    return drafter


def drafted(drafter: NgramDrafter) -> list[int]:
    length, active_1 = int(drafter.lens_B), torch.ones(1, dtype=torch.bool)
    zeros_1 = torch.zeros(1, dtype=torch.int64)
    at, top = zeros_1 + length - 1, length - 1
    asked = Round(chain_plan(K), at, zeros_1, active_1, top, SamplingParams(), DETERMINISTIC)
    return drafter.propose(asked).tokens_BN[0, 1:].tolist()


class Scan:
    """The same by lists."""

    def __init__(self, prompt: list[int], first: int) -> None:
        self.text, self.prompt, self.at = [*prompt, first], prompt, -1

    def drafted(self) -> list[int]:
        for n in (1, 2, 3):
            places = range(n, len(self.prompt))
            found = [s for s in places if self.text[s - n : s] == self.text[-n:]]
            if self.at < 0 and len(found) == 1:
                self.at = found[0]
        return self.prompt[self.at : self.at + K] if self.at >= 0 else []

    def take(self, new: list[int]) -> None:
        goes_on = self.at >= 0 and self.prompt[self.at : self.at + len(new)] == new
        goes_on = goes_on and self.at + len(new) < len(self.prompt)
        self.at = self.at + len(new) if goes_on else -1
        self.text += new


def test_drafts_are_those_of_a_scan() -> None:
    rng, copied = random.Random(0), 0
    for _ in range(60):
        prompt = [rng.randrange(7) for _ in range(14)]
        first = rng.randrange(7)
        drafter, scan = opened(prompt, first), Scan(prompt, first)
        for _ in range(8):
            wanted = scan.drafted()
            assert drafted(drafter)[: len(wanted)] == wanted
            assert wanted or not drafted(drafter)
            copied += len(wanted)
            kept = wanted[: rng.randrange(K + 1)]
            new = [*kept, rng.randrange(7)]
            told(drafter, 0, new, 1)
            scan.take(new)
    assert copied > 500


def rounds_of(prompt: list[int], answer: list[int]) -> list[int]:
    """Tokens that each round gives until the answer is whole."""
    drafter, at, gave = opened(prompt, answer[0]), 1, []
    while at < len(answer):
        right = 0
        for token, true in zip(drafted(drafter), answer[at:], strict=False):
            if token != true:
                break
            right += 1
        new = answer[at : at + right + 1]
        told(drafter, 0, new, 1)
        gave.append(len(new))
        at += len(new)
    return gave


def test_an_edit_costs_the_rounds_around_it() -> None:
    """A copy takes K + 1 tokens a round; after two changed tokens and one more it goes on."""
    prompt = list(range(10, 41))
    assert set(rounds_of(prompt, prompt)) == {K + 1}
    edited = [*prompt[:11], 5, 6, *prompt[13:]]
    assert rounds_of(prompt, edited) == [5, 5, 1, 1, 1, 5, 5, 5, 2]


def test_what_stands_twice_is_no_match_and_what_is_followed_is_not_lost() -> None:
    twice = [1, 2, 3, 4, 8, 1, 2, 3, 5, 9]
    assert not drafted(opened(twice, 1)), "1 stands twice, and nothing is before it in the answer"
    assert drafted(opened(twice, 8)) == [1, 2, 3, 5]
    drafter = opened(twice, 8)
    assert drafted(drafter) == [1, 2, 3, 5]
    told(drafter, 0, [1, 2], 1)  # alone they would lead nowhere
    assert drafted(drafter)[:3] == [3, 5, 9]
    told(drafter, 0, [3, 7], 1)
    assert not drafted(drafter)


def test_no_answer_changes_and_a_round_reads_nothing(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    pair = tiny_target, tiny_tokenizer
    drafter = load_drafter("ngram:unique", *pair)
    assert isinstance(drafter, NgramDrafter) and drafter.unique
    assert not has_folder("ngram:unique")
    changes_nothing(pair, drafter, [({"K": 6}, 3, SETTINGS), ({"K": 2}, 1, SETTINGS[:1])])
    drafter, ones = opened([1, 2, 3], 1), torch.ones(1, 1, dtype=torch.int64)
    kept = Kept(ones, ones[0], None, ones[0])
    with FakeTensorMode(allow_non_fake_inputs=True):  # it raises where a value is read
        drafter._only_match(drafter.text_BS)
        drafter.extend(kept)
    with pytest.raises(ValueError, match=r"got ngram:once, expected ngram or ngram:unique"):
        load_drafter("ngram:once", *pair)
