"""What drafts in rounds of one call: its drafts and states are those of one round at a time."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from covering import covering
from head_folders import made as heads
from head_folders import ours
from several_rounds import (
    NEEDS,
    ROWS,
    TEXTS,
    WAYS,
    Pair,
    drafted_in_rounds,
    one_at_a_time,
    what,
)
from transformers import PreTrainedModel

from draftsmith.decode import sampling
from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.draft_lms.pard import PardDrafter, lm_drafter
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.drafting.base import Kept
from draftsmith.decode.drafting.head_drafter import HeadDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.policies.policy import ALONE as ALONE_ROW
from draftsmith.decode.policies.policy import Load, Outcome, Policy
from draftsmith.decode.policies.timing import round_of
from draftsmith.decode.tree_shapes import Plan, chain_plan, parse_tree
from draftsmith.decode.untrained import composite
from draftsmith.decode.untrained.composite import ALONE, CompositeDrafter
from draftsmith.decode.untrained.jacobi import LookaheadDrafter
from draftsmith.decode.untrained.ngram import NgramDrafter
from draftsmith.decode.untrained.texts import LookupDrafter
from draftsmith.models.vocab import DraftVocab

pytestmark = NEEDS


@pytest.mark.parametrize(
    ("kind", "way", "how"),
    covering(
        ["draft", "pard", "ngram", "suffix", "recycling", "stand", "exit:2"],
        list(WAYS),
        [(1, 4, "fixed"), (ROWS, 2, "fixed"), (2, 3, "table:1-=3")],
    ),
    ids=str,
)
def test_drafted_chains_and_what_is_kept_are_those_of_one_at_a_time(
    pair: Pair,
    near: PreTrainedModel,
    kind: str,
    way: str,
    how: tuple[int, int, str],
    made: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows end in the middle of a chain and others take their places; some drafts know a part of
    the tokens; what is looked up goes as deep as there is hope.
    """
    monkeypatch.setattr(sampling, "likeliest", first_of_equals)
    batch, K, policy = how
    vocab = None if batch == 1 else DraftVocab(torch.arange(0, len(pair[1]), 2), len(pair[1]))

    def answered() -> list[Completion]:
        drafter = drafts_of(kind, near, len(pair[1]), vocab) or load_drafter(kind, *pair)
        decoder = Decoder(*pair, drafter, K=K, policy=policy, batch_size=batch)
        texts = [TEXTS[0], *TEXTS, TEXTS[0]]
        return what(decoder.generate(texts, WAYS[way], indices=[0, *range(len(TEXTS)), 0]))

    found = answered()
    drafted, kept = (sum(n) for n in zip(*map(counted, found), strict=True))
    # What remembers answers is to hold nothing past the string that ends one.
    remembers = kind not in ("draft", "pard", "ngram", "exit:2")
    alone = WAYS[way].top_k > 0 or (WAYS[way].stop and remembers)
    assert not made if alone else max(made) > 2
    assert drafted > kept and kept > (len(found) if kind == "draft" else -(kind == "ngram"))
    calls = len(made)
    one_at_a_time(monkeypatch)
    again = answered()
    assert len(made) == calls
    if WAYS[way].stop and kind == "ngram":  # rows whose text has ended go on with the others
        assert [one.tokens for one in found] == [one.tokens for one in again]
    else:
        assert found == again


@pytest.mark.parametrize(
    ("names", "way", "batch"),
    [
        ("suffix+eagle3", "greedy", 1),
        ("suffix+medusa", "drawn", 1),
        ("recycling+eagle3", "greedy", 1),
        ("stand+hydra", "greedy", 1),
        ("suffix+draft", "greedy", 1),
        ("suffix+draft", "drawn", 1),
        ("suffix+draft", "greedy", 3),
        ("suffix+draft", "drawn", 2),
        ("suffix+pard", "greedy", 1),
        ("suffix+pard", "drawn", 3),
        ("suffix+eagle3", "greedy", 3),
        ("stand+hydra", "greedy", 2),
        ("stand+eagle3", "greedy", 4),
    ],
)
def test_two_drafters_as_one_are_what_they_are_one_at_a_time(
    pair: Pair,
    near: PreTrainedModel,
    names: str,
    way: str,
    batch: int,
    made: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """What is looked up goes deeper than the head; in a second answer to one prompt it is sure, if
    it needn't be surer than such a target. Of several rows each has its own of both chains.
    """
    monkeypatch.setattr(composite, "SURE", 0.6 if names.startswith("suffix") else 0.03)
    answered = partial(answers_of, pair, near, names, way, batch, tmp_path, K=5)
    found, held = answered()
    beyond = sum(sum(one.counters.histogram[4:]) for one in found)  # rounds, of the head's levels
    assert max(made) > 2 and beyond > 0
    one_at_a_time(monkeypatch)
    again, like = answered()
    assert found == again and all(map(torch.equal, held, like))


@pytest.mark.parametrize(
    ("names", "way", "batch"),
    [
        ("suffix+draft", "greedy", 1),
        ("suffix+draft", "drawn", 3),
        ("suffix+eagle3", "greedy", 3),
        ("recycling+medusa", "drawn", 1),
        ("stand+draft", "drawn", 2),
    ],
)
def test_a_copy_beside_a_draft_is_kept_where_that_fails(
    pair: Pair,
    near: PreTrainedModel,
    names: str,
    way: str,
    batch: int,
    made: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """No row is ever sure. Where the plan has no more nodes than the head's levels none is beside
    it, and more rounds are needed; both are those of one at a time, what is kept of them too.
    """
    monkeypatch.setattr(composite, "BELIEVED", 1e6)
    monkeypatch.setattr(composite, "SURE", 2.0)
    answered = partial(answers_of, pair, near, names, way, batch, tmp_path)
    (found, held), (without, _) = answered(K=7), answered(K=3)
    assert [one.tokens for one in found] == [one.tokens for one in without]
    assert sum(one.counters.rounds for one in found) < sum(one.counters.rounds for one in without)
    assert max(made) > 1
    one_at_a_time(monkeypatch)
    again, like = answered(K=7)
    assert found == again and all(map(torch.equal, held, like))


@pytest.mark.parametrize(
    ("kind", "way", "batch"),
    [
        ("draft", "greedy", 1),
        ("draft", "drawn", 3),
        ("pard", "greedy", 1),
        ("pard", "drawn", 3),
        ("eagle3", "drawn", 1),
        ("eagle3", "greedy", 3),
    ],
)
def test_who_did_not_lead_takes_in_what_it_would_have_heard(
    pair: Pair,
    near: PreTrainedModel,
    kind: str,
    way: str,
    batch: int,
    made: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Rounds without a draft, of the store alone, and of both by turns, rows that end among them:
    chains and what is kept of them are those of one round at a time, and so are the trained one's
    keys, values and states, which aren't those of who never hears of the store's own rounds.
    """
    asked = [0, 0] if batch == 1 else [2, 1, 0, 3, 0, 3, 1]

    def answered(*, told: bool = True) -> tuple[list[Completion], list[torch.Tensor]]:
        drafter = composed(pair, f"suffix+{kind}", near, tmp_path)
        decoder = Decoder(*pair, drafter, K=5, batch_size=batch)
        decoder.policy = Turns([None, replace(chain_plan(5), by=ALONE), chain_plan(5)])
        if not told:
            monkeypatch.setattr(drafter, "owe", lambda rounds: None)
        done = what(decoder.generate([TEXTS[i] for i in asked], WAYS[way], indices=asked))
        with torch.inference_mode():
            drafter._settle()
        return done, holds(drafter, done)

    found, held = answered()
    assert max(made) > 1
    _, other = answered(told=False)
    assert not held[0].equal(other[0])
    one_at_a_time(monkeypatch)
    again, like = answered()
    assert found == again and all(map(torch.equal, held, like))


def answers_of(
    pair: Pair, near: PreTrainedModel, names: str, way: str, batch: int, folder: Path, K: int
) -> tuple[list[Completion], list[torch.Tensor]]:
    """Of a composite, some prompts asked again; and what a draft LM then holds."""
    asked = [0, 0, 0] if batch == 1 else [2, 1, 0, 3, 0, 3, 1, 1, 1, 1, 0, 2]
    drafter = composed(pair, names, near, folder)
    decoder = Decoder(*pair, drafter, K=K, batch_size=batch)
    done = what(decoder.generate([TEXTS[i] for i in asked], WAYS[way], indices=asked))
    return done, holds(drafter, done) if names.endswith(("draft", "pard")) else []


class Turns(Policy):
    """Three rounds of each plan by turns."""

    rests, EACH = True, 3

    def __init__(self, turns: Sequence[Plan | None]) -> None:
        super().__init__(chain_plan(5))
        self.turns, self.heard = turns, 0

    def next_plan(self, load: Load = ALONE_ROW) -> Plan | None:
        self.stays = self.EACH - self.heard % self.EACH
        return self.turns[self.heard // self.EACH % len(self.turns)]

    def observe(self, outcome: Outcome) -> None:
        self.heard += 1


def drafts_of(
    kind: str, near: PreTrainedModel, tokens: int, vocab: DraftVocab | None = None
) -> LMDrafter | None:
    """The draft LM, token by token or all in one pass; None for what isn't a draft LM."""
    if kind not in ("draft", "pard"):
        return None
    model = copy.deepcopy(near)
    if kind == "pard":
        model.config.pard_token, model.config.para_num = 7, 6
    return lm_drafter(model, tokens, vocab)


def composed(pair: Pair, names: str, near: PreTrainedModel, folder: Path) -> CompositeDrafter:
    """A store beside a draft LM, or a head of that kind in a folder."""
    looked, _, kind = names.partition("+")
    if (draft := drafts_of(kind, near, len(pair[1]))) is not None:
        first = load_drafter(looked, *pair)
        assert isinstance(first, LookupDrafter)
        return CompositeDrafter(first, draft, 3)
    torch.manual_seed(0)
    folder = ours(folder / "head", heads(kind, pair[0], width=32).bfloat16(), *pair)
    both = load_drafter(f"{looked}+{folder}", *pair)
    assert isinstance(both, CompositeDrafter)
    return both


def holds(both: CompositeDrafter, done: list[Completion]) -> list[torch.Tensor]:
    """The trained one's keys and values up to where all answers reach, and a head's states."""
    trained = both.trained
    assert isinstance(trained, (LMDrafter, HeadDrafter))
    read = min(len(one.prompt_tokens) + len(one.tokens) for one in done) - 2
    if isinstance(trained, PardDrafter):
        read -= trained.levels  # which may wait
    held = [trained.pool.kv_2LBSHE[:, :, :, :read].clone()]
    return held + ([trained.state_BH] if isinstance(trained, HeadDrafter) else [])


@pytest.mark.parametrize("kind", ["exit:2", "skip:1", "swift"])
def test_what_hears_nothing_rests_in_rounds_of_one_call(
    pair: Pair, kind: str, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First layers that stay as they are; of those that are searched for every round is told."""
    drafter = load_drafter(kind, *pair)
    assert drafter is not None and drafter.hears == (kind == "swift")
    decoder = Decoder(*pair, drafter, K=3, policy="table:1-=0", batch_size=2)
    found = what(decoder.generate(TEXTS[:3], WAYS["drawn"]))
    assert max(made) > 2 if kind != "swift" else not made
    assert not any(one.counters.drafted for one in found)
    one_at_a_time(monkeypatch)
    assert found == what(decoder.generate(TEXTS[:3], WAYS["drawn"]))


def test_ngram_drafts_alike_for_rows_without_a_match() -> None:
    """Which draft the text's beginning, beside one with a match."""
    drafter, texts = NgramDrafter(), [[7, 2, 3], [4, 5, 4], [9, 9, 9, 9]]
    drafter.reset(len(texts), 16)
    for row, text in enumerate(texts):
        drafter.text_BS[row, : len(text)] = torch.tensor(text)
        drafter.lens_B[row] = len(text)
    plan, lens_B = parse_tree("chain", 3), drafter.lens_B - 1
    request = round_of(plan, len(texts), 8, torch.device("cpu"))
    pending_B = torch.tensor([text[-1] for text in texts])
    request = replace(request, lens_B=lens_B, pending_B=pending_B)
    tree = drafter.propose(request)
    assert torch.equal(drafted_in_rounds(drafter, request, tree), tree.tokens_BN)


def first_of_equals(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As C++ takes them, where bf16 makes many alike and topk takes any."""
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], ids[..., :count]


def counted(one: Completion) -> tuple[int, int]:
    """Tokens drafted, and kept."""
    return one.counters.nodes, sum(one.accepted)


def test_a_window_of_guesses_hears_of_each_round(pair: Pair, made: list[int]) -> None:
    """What the target chose at every node isn't told of rounds of one call."""
    drafter = load_drafter("lookahead:4", *pair)
    assert isinstance(drafter, LookaheadDrafter)
    extend, heard = drafter.window.extend, list[int]()

    def noted(kept: Kept) -> None:
        heard.append(drafter.made)
        extend(kept)

    drafter.window.extend = noted  # type: ignore[method-assign]
    [done] = Decoder(*pair, drafter, K=4).generate(TEXTS[:1], WAYS["greedy"])
    assert heard == [2] * done.counters.rounds and not made
