"""Several rounds in one call: what they come to is what one at a time does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from head_folders import made as heads
from head_folders import ours
from several_rounds import (
    NEEDS,
    ROWS,
    TEXTS,
    WAYS,
    Pair,
    one_at_a_time,
    what,
)
from tiny_llama import build_llama
from transformers import PreTrainedModel

from draftsmith.decode.draft_lms.ahead import AheadDrafter
from draftsmith.decode.draft_lms.easy import EasyDrafter
from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.drafting.base import Round
from draftsmith.decode.engine import round as rounds
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion, open_request
from draftsmith.decode.engine.several import MOST, SHARED, rounds_at_once
from draftsmith.decode.forward.native import NativeBody
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.token_tree import TokenTree

KINDS = ("eagle3", "block")  # that read the target's states
pytestmark = NEEDS


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("batch", "head"), [(1, "torch"), (ROWS, "torch"), (ROWS, "own")])
def test_answers_and_counts_are_those_of_one_at_a_time(
    pair: Pair, way: str, batch: int, head: str, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end by length, by tokens and by strings, and others take their places; logits are made
    in C++, where the machine has these, or by a call of torch.
    """
    if head == "torch":
        monkeypatch.setattr(NativeBody, "reads_out", lambda *_: False)
    decoder = Decoder(*pair, batch_size=batch)
    found = what(decoder.generate(TEXTS, WAYS[way]))
    calls = len(made)
    longest = MOST if WAYS[way].stop else SHARED if WAYS[way].greedy else 2 * MOST
    most = min(longest, SHARED // batch, WAYS[way].max_new_tokens - 1)
    assert max(made) == most or (way == "ends" and batch > 1 and max(made) > MOST)
    one_at_a_time(monkeypatch)
    assert found == what(decoder.generate(TEXTS, WAYS[way])) and len(made) == calls


@pytest.mark.parametrize("many", [1, 4])
def test_rows_of_other_laws_share_a_call(
    many: int, pair: Pair, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a session of which each row samples its own way, and those that nobody holds wait."""
    decoder = Decoder(*pair)

    def answered() -> list[Completion]:
        session, requests = decoder.open_session(ROWS, 200), []
        for i, params in enumerate([*WAYS.values()][:many]):
            how = {"params": params, "context": 200, "end_ids": decoder.eos_ids}
            requests.append(open_request(TEXTS[i], i, i, tokenizer=pair[1], **how))
            session.submit(requests[-1])
        while session.busy:
            session.step()
        session.close()
        return what([request.completion for request in requests])

    found = answered()
    assert max(made) == min(MOST, SHARED // (1 << (many - 1).bit_length()))
    one_at_a_time(monkeypatch)
    assert found == answered()


def test_a_row_without_numbers_ends(
    pair: Pair, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the round that feeds what gives none; the others go on."""
    answer = Decoder(*pair).generate(TEXTS[:1], WAYS["greedy"])[0].tokens
    token = next(t for i, t in enumerate(answer) if i > 5 and t > 20 and t not in answer[:i])
    made.clear()
    broken = build_llama(len(pair[1]), layers=3, hidden=128, seed=0)
    broken = broken.requires_grad_(False).bfloat16()
    with torch.no_grad():
        broken.model.embed_tokens.weight[token] = torch.nan
    texts = [text for text in TEXTS if token not in pair[1](text).input_ids]
    decoder = Decoder(broken, pair[1], batch_size=ROWS)
    found = what(decoder.generate(texts, WAYS["greedy"]))
    assert (
        made
        and found[0].finish_reason == "error"
        and found[0].tokens == answer[: answer.index(token) + 1]
    )
    assert any(one.finish_reason == "length" for one in found)
    one_at_a_time(monkeypatch)
    again = what(decoder.generate(texts, WAYS["greedy"]))
    assert [one.tokens for one in found] == [one.tokens for one in again]
    assert [one.error for one in found] == [one.error for one in again]


@pytest.mark.parametrize("kind", ["draft", "suffix", "eagle3", "block"])
@pytest.mark.parametrize("way", ["greedy", "drawn"])
def test_a_drafter_that_rests_is_owed_each_round(
    pair: Pair,
    kind: str,
    way: str,
    made: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """What it drafts after them is what it drafts after as many rounds one at a time."""
    folder = str(ours(tmp_path, heads(kind, pair[0]), *pair)) if kind in KINDS else kind
    wanted = list[int]()

    def answered() -> tuple[list[Completion], list[list[int]]]:
        drafter = LMDrafter(pair[0], len(pair[1])) if kind == "draft" else None
        drafter = drafter or load_drafter(folder, *pair)
        decoder = Decoder(*pair, drafter, policy="table:1-=3", K=3, batch_size=1)
        policy, drafted, propose = decoder.policy, list[list[int]](), drafter.propose
        wanted.clear()

        def next_plan(*_: Any) -> Any:
            assert decoder._batch is not None
            held = decoder._batch.rows.requests[0]
            assert held is not None
            policy.stays = MOST + 1 - len(held.completion.tokens) % 20
            wanted.append(policy.stays)
            return None if policy.stays > 0 else policy.plans[-1]

        def noted(request: Round) -> TokenTree:
            tree = propose(request)
            drafted.append(tree.tokens_BN[0].tolist())
            return tree

        policy.next_plan, drafter.propose = next_plan, noted
        done = decoder.generate([TEXTS[0], TEXTS[0]], WAYS[way], indices=[0, 0])
        return what(done), drafted

    found = answered()
    assert max(made) == max(wanted) >= MOST and len(found[1]) >= 2
    assert kind in KINDS or sum(map(sum, (one.accepted for one in found[0]))) > 0
    one_at_a_time(monkeypatch)
    assert found == answered()


@pytest.mark.parametrize("kind", ["jacobi:3", "swift"])
def test_a_drafter_that_owes_nothing_is_told_of_each_round(
    pair: Pair, kind: str, made: list[int]
) -> None:
    decoder = Decoder(*pair, load_drafter(kind, *pair), policy="table:1-=3", K=3)
    assert decoder.drafter is not None
    decoder.policy.next_plan, decoder.policy.stays = lambda *_: None, MOST
    told, extend = list[int](), decoder.drafter.extend
    decoder.drafter.extend = lambda kept: told.append(1) or extend(kept)
    decoder.generate(TEXTS[:1], WAYS["greedy"])
    assert len(told) == WAYS["greedy"].max_new_tokens - 1 and not made


def test_policies_hear_each_rounds_own_seconds(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rounds of unlike size in one call; what lies around them is shared out."""
    decoder, several, heard = Decoder(*pair), rounds.several, list[Any]()

    def said(*args: Any) -> Any:
        *found, took = several(*args)
        assert len(took) == len(found[0]) and min(took) > 0
        return (*found, [float(m) for m in range(len(took))])

    monkeypatch.setattr(rounds, "several", said)
    monkeypatch.setattr(decoder.policy, "observe", heard.append)
    decoder.generate(TEXTS[:1], WAYS["greedy"])
    first = heard[0].seconds
    assert [one.seconds - first for one in heard[:MOST]] == pytest.approx(range(MOST))


@pytest.mark.parametrize("way", ["ends", "warm"])
def test_streamed_text_is_the_answers(pair: Pair, way: str, made: list[int]) -> None:
    """Without what ends it, which the same call gives."""
    texts, done = dict[int, str](), dict[int, Completion]()
    for event in Decoder(*pair, batch_size=ROWS).stream(TEXTS, WAYS[way]):
        texts[event.index] = texts.get(event.index, "") + event.text
        if event.completion is not None:
            done[event.index] = event.completion
    assert max(made) == min(MOST, SHARED // ROWS)
    assert any(one.finish_reason == "stop" for one in done.values())
    assert texts == {index: one.text for index, one in done.items()}


def test_what_fails_in_the_middle_is_raised(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, logits, calls = Decoder(*pair), Runner.logits, 0

    def fails(runner: Runner, states: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:  # the prompt's is the first
            raise RuntimeError("no room")
        return logits(runner, states)

    monkeypatch.setattr(Runner, "logits", fails)
    with pytest.raises(RuntimeError, match="no room"):
        decoder.generate(TEXTS[:1], WAYS["filtered"])


def test_rounds_that_are_looked_at_are_made_one_at_a_time(
    pair: Pair, near: PreTrainedModel, made: list[int]
) -> None:
    """Trees, policies that ask in the middle of one, laws with filters, drafters in other forms."""
    for settings in ({"tree": "kary:2,2"}, {"policy": "confidence"}, {"rule": "leviathan"}):
        drafter = LMDrafter(near, len(pair[1]))
        decoder = Decoder(*pair, drafter, K=2, **settings)
        decoder.generate(TEXTS[:1], WAYS["drawn"])
    own = LMDrafter(near, len(pair[1]))
    for kind in (AheadDrafter(own, 2), EasyDrafter(own, 1)):
        Decoder(*pair, kind, K=2).generate(TEXTS[:1], WAYS["drawn"])
    Decoder(*pair, own, K=2).generate(TEXTS[:1], WAYS["filtered"])
    assert not made
    Decoder(*pair, own, K=2).generate(TEXTS[:1], WAYS["drawn"])
    assert made


def test_where_there_is_no_such_call(pair: Pair) -> None:
    runner = Decoder(*pair).runner
    assert rounds_at_once(runner, 1, WAYS["drawn"]) == (MOST, MOST)
    assert rounds_at_once(runner, 64, WAYS["drawn"]) == (1, 1)  # one in 64 ends soon
    assert rounds_at_once(runner, 32, WAYS["drawn"]) == (2, 2)
    assert rounds_at_once(runner, 1, WAYS["drawn"], 5) == (MOST, MOST + 8)
    assert runner.native is not None
    runner.native.small = False  # a pass then takes far longer than all around it
    assert rounds_at_once(runner, 1, WAYS["drawn"])[0] == 0
