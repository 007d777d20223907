"""Rounds that draft nothing: what a drafter drafts after them is what it would have drafted had it
taken each in, and no answer changes.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_folders import made, ours
from rounds import record_rounds
from tiny_llama import build_llama
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import LONGER, PROMPTS, truths

from draftsmith.decode.draft_lms.easy import EasyDrafter
from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.drafting import owed
from draftsmith.decode.drafting.base import Admitted, Drafter, Kept, Round
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import open_request
from draftsmith.decode.engine.session import Session
from draftsmith.decode.forward.runner import WARM_UP
from draftsmith.decode.token_tree import TokenTree
from draftsmith.decode.tree_shapes import chain_plan
from draftsmith.decode.untrained.composite import ALONE, CompositeDrafter
from draftsmith.decode.untrained.suffix import SuffixDrafter

KINDS = ("eagle3", "peagle", "hydra", "block", "kangaroo", "longspec")
RESTS = (0, 3, 1, 14)  # rounds without a draft between two with one; EasyDrafter feeds 9 again

Drafted = dict[tuple[int, ...], list[int]]


def resting(
    pair: Any, drafter: Drafter, *, batch: int = 3, sleeps: bool = False, **how: Any
) -> tuple[Decoder, Drafted]:
    """A decoder that rests, and what it drafts after each text that its rows come to. It sleeps
    when prompts come in; sleeps: in its rounds too.
    """
    decoder = Decoder(*pair, drafter, batch_size=batch, policy="table:1-=3", K=3, **how)
    whole = decoder.policy.plans[-1]
    turns = itertools.cycle(t for n in RESTS for t in [whole, *[None] * n])

    def next_plan(*_: Any) -> Any:
        decoder.policy.asleep = sleeps
        return next(turns)

    def observe(*_: Any) -> None:
        decoder.policy.asleep = True

    decoder.policy.next_plan, decoder.policy.observe = next_plan, observe  # type: ignore[method-assign]
    decoder.policy.asleep = True
    drafted: Drafted = {}
    propose = drafter.propose

    def noted(request: Round) -> TokenTree:
        tree = propose(request)
        assert decoder._batch is not None
        for row, active in enumerate(request.active_B.tolist()):
            held = decoder._batch.rows.requests[row]
            if active and held is not None:
                text = (*held.completion.prompt_tokens, *held.completion.tokens)
                drafted[text] = tree.tokens_BN[row, 1:].tolist()
        return tree

    drafter.propose = noted  # type: ignore[method-assign]
    return decoder, drafted


def eagle3(folder: Path, pair: Any) -> Drafter:
    drafter = load_drafter(str(ours(folder / "it/drafter", made("eagle3", pair[0]), *pair)), *pair)
    assert drafter is not None
    return drafter


def decode(decoder: Decoder, pair: Any, ways: Any = LONGER[:2]) -> None:
    for params in ways:
        done = decoder.generate(PROMPTS, params)
        assert [c.tokens for c in done] == truths(*pair, params)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_drafts_as_if_it_had_taken_in_each_round(
    kind: str, tmp_path: Path, tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    pair = tiny_target, tiny_tokenizer
    folder = ours(tmp_path / "it/drafter", made(kind, tiny_target), *pair)
    found = []
    for owes in (True, False):
        drafter = load_drafter(str(folder), *pair)
        assert drafter is not None and drafter.owes
        drafter.owes = owes
        decoder, drafted = resting(pair, drafter)
        decode(decoder, pair)
        assert decoder._batch is not None and (decoder._batch.owed is not None) == owes
        found.append(drafted)
    assert found[0] == found[1] and len(found[0]) > 40


@pytest.mark.parametrize("name", ["ngram", "ngram:unique", "suffix", "suffix+eagle3"])
def test_what_is_looked_up_is_as_if_each_round_had_been_heard(
    name: str, tmp_path: Path, tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """In the second pass over the prompts too, where a store knows the answers of the first."""
    pair = tiny_target, tiny_tokenizer
    folder = ours(tmp_path / "it/drafter", made("eagle3", tiny_target), *pair)
    found = []
    for owes in (True, False):
        drafter = load_drafter(name.replace("eagle3", str(folder)), *pair)
        assert drafter is not None and drafter.owes
        drafter.owes = owes
        decoder, drafted = resting(pair, drafter)
        decode(decoder, pair, LONGER[:2] * 2)
        found.append(drafted)
    assert found[0] == found[1] and len(found[0]) > 40


@pytest.mark.parametrize("name", ["recycling", "stand", "lookahead:4"])
def test_tables_rest_too(
    name: str, tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """They learn nothing of rounds that drafted nothing, for which no laws are told."""
    pair = tiny_target, tiny_tokenizer
    drafter = load_drafter(name, *pair)
    assert drafter is not None
    decoder, drafted = resting(pair, drafter)
    decode(decoder, pair)
    assert drafted


def likeliest_after(model: PreTrainedModel, text: tuple[int, ...], vocab: int) -> int:
    return int(model(torch.tensor([text])).logits[0, -1, :vocab].argmax())


@pytest.mark.parametrize("group", [0, 2], ids=["lm", "easy"])
def test_a_draft_lm_knows_what_it_did_not_draft(
    group: int,
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first drafted token is that of its own law after the whole text; not so where what is
    owed is thrown away.
    """
    pair = tiny_target, tiny_tokenizer
    draft = build_llama(len(tiny_tokenizer), layers=4, hidden=32, seed=5).requires_grad_(False)

    def wrong() -> float:
        drafter = LMDrafter(draft, len(tiny_tokenizer))
        drafter = EasyDrafter(drafter, group) if group else drafter
        decoder, drafted = resting(pair, drafter)
        decode(decoder, pair, LONGER[:1])
        missed = [
            first != likeliest_after(draft, text, len(tiny_tokenizer))
            for text, (first, *_) in drafted.items()
        ]
        return sum(missed) / len(missed)

    assert wrong() == 0
    monkeypatch.setattr(LMDrafter, "_take_in", lambda *_: None)
    assert wrong() > 0.1


def test_recorded_rounds_rest_too(
    tmp_path: Path, tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Those with a draft and those without are recorded apart; none is timed before it is."""
    pair = tiny_target, tiny_tokenizer
    decoder, drafted = resting(pair, eagle3(tmp_path, pair))
    decoder.late, timed = True, list[bool]()
    decoder.policy.observe = lambda told: timed.append(told.seconds is not None)  # type: ignore[method-assign]
    recordings = record_rounds(decoder)
    decode(decoder, pair, LONGER[:1])
    assert len(recordings) == 2 and drafted
    assert not any(timed[: 2 * WARM_UP + 1]) and all(timed[-10:])


def test_of_more_than_can_wait_the_oldest_are_lost(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owed, "TOKENS", 2)
    pair = tiny_target, tiny_tokenizer
    decoder, drafted = resting(pair, LMDrafter(tiny_draft, len(tiny_tokenizer)))
    decode(decoder, pair)
    assert drafted


def test_rows_that_nobody_has_held_owe_nothing(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Where one rests while the others are idle, what is looked up hears of the one alone."""
    pair = tiny_target, tiny_tokenizer
    drafter = load_drafter("suffix", *pair)
    assert isinstance(drafter, SuffixDrafter)
    decoder = Decoder(*pair, drafter, policy="table:1-1=0,2-=3", K=3)
    session = decoder.open_session(4, 96)
    for seed in range(3):
        answered(session, decoder, seed, 1)
    assert drafter.lens_B[0] > 0 and drafter.lens_B[1:].tolist() == [0, 0, 0]


def test_a_session_owes_nothing_of_the_one_before(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """The first one ends in rounds without a draft."""
    pair = tiny_target, tiny_tokenizer
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    decoder = Decoder(*pair, drafter, policy="table:1-3=3,4-=0", K=3)
    for many in (4, 3):
        session = decoder.open_session(4, 96)
        found = answered(session, decoder, 0, many)
        assert found == truths(*pair, LONGER[0])[:many]
        session.close()


def test_what_waits_is_taken_in_as_it_is_and_rows_that_nobody_holds_have_none(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounds of a store alone, of three requests in eight rows, of which four are computed: what
    the other one takes in is as wide as the longest, and brings no noise along.
    """
    size, taken = len(tiny_tokenizer), list[Kept]()
    trained = LMDrafter(tiny_target, size)
    both = CompositeDrafter(SuffixDrafter("suffix", torch.device("cpu"), size), trained, 3)
    decoder = Decoder(tiny_target, tiny_tokenizer, both, K=5)
    turns = itertools.cycle([replace(chain_plan(5), by=ALONE)] * 3 + [chain_plan(5), None])
    decoder.policy.rests = True
    decoder.policy.next_plan = lambda *_: next(turns)  # type: ignore[method-assign]

    def noted(self: LMDrafter, kept: Kept, catch_up: Any = LMDrafter.catch_up) -> None:
        taken.append(kept)
        catch_up(self, kept)

    monkeypatch.setattr(LMDrafter, "catch_up", noted)
    session = decoder.open_session(8, 96)
    found = answered(session, decoder, 0, 3)
    assert found == truths(tiny_target, tiny_tokenizer, LONGER[0])[:3]
    settled = [kept for kept in taken if kept.nodes_BN is None]
    assert len(settled) > 3 and all(kept.lens_B.min() > 0 for kept in settled)
    assert all(kept.tokens_BL.shape[1] == int(kept.n_new_B.max()) > 0 for kept in settled)
    assert all(waits.race_BLV is waits.nodes_BN is None for waits in both.owed.rounds)


def answered(session: Session, decoder: Decoder, seed: int, many: int) -> list[list[int]]:
    """So many prompts, by rows of their own."""
    how = {"tokenizer": decoder.tokenizer, "params": LONGER[0], "context": 96}
    requests = [open_request(text, i, seed, **how) for i, text in enumerate(PROMPTS[:many])]
    for request in requests:
        session.submit(request)
    while session.busy:
        session.step()
    return [request.completion.tokens for request in requests]


def test_prompts_wait_beside_those_of_busy_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of rows that have ended make room; of a padded batch only its own tokens stay."""
    debt = owed.Owed(torch.zeros(4, dtype=torch.int64), taps=True)

    def asked(row: int, many: int = 8) -> Admitted:
        own = torch.tensor([row]), torch.ones(1, 8, dtype=torch.int64), torch.tensor([many])
        return Admitted(*own, torch.tensor([3]), torch.zeros(1, 8, 4))

    one = sum(x.nbytes for x in asked(0) if x is not None)
    monkeypatch.setattr(owed, "PROMPTS", 2 * one)
    assert debt.admit(asked(0), [], asleep=True) and debt.admit(asked(1), [0], asleep=True)
    assert not debt.admit(asked(2), [0, 1], asleep=True) and set(debt.prompts) == {0, 1}
    assert debt.admit(asked(2, many=5), [1], asleep=True) and set(debt.prompts) == {1, 2}
    assert not debt.admit(asked(1), [2], asleep=False) and set(debt.prompts) == {2}
    kept = debt.prompts[2]
    assert kept.taps_RNU is not None and kept.taps_RNU.shape == (1, 5, 4)
    assert kept.tokens_RN.untyped_storage().nbytes() == 40


def test_prompts_wait_without_their_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch counts as what its prompts have; states not padded yet are as those that are."""
    debt = owed.Owed(torch.zeros(2, dtype=torch.int64), taps=True)
    lens_R, taps_RNU = torch.tensor([8, 2]), torch.randn(2, 8, 4)
    taps_RNU[1, 2:] = 0
    own = torch.tensor([0, 1]), torch.ones(2, 8, dtype=torch.int64), lens_R, torch.tensor([3, 4])
    padded, loose = Admitted(*own, taps_RNU), Admitted(*own, None, (taps_RNU[0], taps_RNU[1, :2]))
    again = loose.padded()
    assert again.taps_RNU is not None and torch.equal(again.taps_RNU, taps_RNU)
    size = sum(x.nbytes for i in range(2) for x in padded.alone(i) if x is not None)
    monkeypatch.setattr(owed, "PROMPTS", size)
    for one in (padded, loose):
        assert debt.admit(one, [], asleep=True) and set(debt.prompts) == {0, 1}
        for row, many in enumerate(lens_R.tolist()):
            kept = debt.prompts[row].taps_RNU
            assert kept is not None and torch.equal(kept, taps_RNU[row : row + 1, :many])
    monkeypatch.setattr(owed, "PROMPTS", size - 1)
    assert not debt.admit(padded, [], asleep=True) and not debt.prompts


def test_what_is_owed_is_in_order_of_position() -> None:
    """Tokens 10 p of positions p; of three rows one has just begun, one rests."""
    debt = owed.Owed(torch.zeros(3, dtype=torch.int64), taps=True)
    lens_B = torch.tensor([5, 31, 40])
    debt.begin(slice(None), lens_B)

    def states(lens_B: Tensor) -> Tensor:
        return torch.stack([lens_B, lens_B + 0.5], 1)[:, None].float()

    for _ in range(4):
        kept = Kept(10 * lens_B[:, None], torch.ones_like(lens_B), None, lens_B, states(lens_B))
        debt.take([kept], replayed=False)
        lens_B = lens_B + torch.tensor([1, 1, 0])
    debt.begin(torch.tensor([0]), torch.tensor([8]))
    kept = debt.settled(lens_B, 99)
    assert kept.n_new_B.tolist() == [1, 4, 0] and kept.lens_B.tolist() == [8, 31, 40]
    assert kept.tokens_BL[0, 0] == 80 and kept.tokens_BL[1].tolist() == [310, 320, 330, 340]
    assert kept.taps_BLU is not None and kept.taps_BLU[1, :, 1].tolist() == [31.5, 32.5, 33.5, 34.5]


def test_rounds_of_several_tokens_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens 10 p of positions p, in rounds of 0 to 3: of a row that began later, one beside fewer,
    and of the oldest lost.
    """
    monkeypatch.setattr(owed, "STATES", 3)
    for computed in (3, 2):
        debt = owed.Owed(torch.zeros(3, dtype=torch.int64), taps=True)
        lens_B = torch.tensor([5, 31, 40])
        for i, news in enumerate([(1, 3, 2), (3, 0, 2), (2, 1, 2), (1, 2, 2)]):
            if i == 2:  # another text
                lens_B = lens_B.index_fill(0, torch.tensor([0]), 7)
                debt.begin(torch.tensor([0]), torch.tensor([7]))
            at_BL = lens_B[:computed, None] + torch.arange(3)
            kept = Kept(10 * at_BL, torch.tensor(news)[:computed], None, lens_B[:computed])
            debt.take([kept._replace(taps_BLU=at_BL[..., None].float())], replayed=False)
            lens_B = lens_B + torch.tensor(news)
        kept = debt.settled(lens_B[:computed], 99)
        assert kept.taps_BLU is not None and not debt.rounds
        assert kept.lens_B.tolist() == [7, 34, 45][:computed]
        for row in range(computed):
            own = list(range(int(kept.lens_B[row]), int(lens_B[row])))
            assert kept.n_new_B[row] == len(own) == 3
            assert kept.tokens_BL[row].tolist()[:3] == [10 * at for at in own]
            assert kept.taps_BLU[row, :3, 0].tolist() == own


@pytest.mark.parametrize("room", [0, 64 << 20])
def test_a_drafter_that_sleeps_hears_nothing_and_goes_on_from_what_it_knew(
    room: int,
    tmp_path: Path,
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No states are taken for it, nothing waits but prompts, for which there is room or none;
    answers are the same.
    """
    monkeypatch.setattr(owed, "PROMPTS", room)
    pair = tiny_target, tiny_tokenizer
    decoder, drafted = resting(pair, eagle3(tmp_path, pair), sleeps=True)
    taken, verify = [], decoder.runner.verify
    waiting: dict[int, int] = {}

    def noted(*args: Any, **how: Any) -> Any:
        hidden_BNH, taps_BNU = verify(*args, **how)
        nodes = hidden_BNH.shape[1]
        taken.append((nodes, taps_BNU is not None))
        assert decoder._batch is not None and decoder._batch.owed is not None
        waiting[nodes] = max(waiting.get(nodes, 0), len(decoder._batch.owed.prompts))
        return hidden_BNH, taps_BNU

    decoder.runner.verify = noted  # type: ignore[method-assign]
    decode(decoder, pair)
    assert drafted and set(taken) == {(1, False), (4, True)}
    assert waiting == {1: 3 if room else 0, 4: 0}
    assert decoder._batch is not None and decoder._batch.owed is not None
    assert not decoder._batch.owed.rounds
