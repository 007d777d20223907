"""Several rounds in one call: what they come to is what one at a time does."""

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_folders import made as heads
from head_folders import ours
from tiny_llama import build_llama
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS

from draftsmith.decode import sampling
from draftsmith.decode.drafters.lm import AheadDrafter, EasyDrafter, LMDrafter
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.drafting.base import Round
from draftsmith.decode.drafting.head_drafter import HeadDrafter
from draftsmith.decode.engine import round as rounds
from draftsmith.decode.engine import rows
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion, open_request
from draftsmith.decode.engine.several import MOST, rounds_at_once
from draftsmith.decode.forward import compiled
from draftsmith.decode.forward.native import NativeBody
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.policies.timing import round_of
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import TokenTree
from draftsmith.decode.tree_shapes import parse_tree
from draftsmith.decode.untrained.ngram import NgramDrafter
from draftsmith.models.vocab import DraftVocab

Pair = tuple[PreTrainedModel, PreTrainedTokenizerBase]
ROWS, KINDS = 3, ("eagle3", "block")  # kinds that read the target's states
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        compiled.library() is None or compiled.library().most(0) < ROWS,
        reason="no C++ compiler, or products of so few tokens only",
    ),
]
TEXTS = [*PROMPTS, "while", "return self", "try:\n    pass\n"]
WAYS = {
    "greedy": SamplingParams(max_new_tokens=37, ignore_eos=True),
    "drawn": SamplingParams(1.0, max_new_tokens=37, seed=7),
    "warm": SamplingParams(0.7, max_new_tokens=21, seed=8, stop=("e", "or")),
    "filtered": SamplingParams(0.9, max_new_tokens=37, top_k=20, top_p=0.8),
    "ends": SamplingParams(1.3, max_new_tokens=37, stop_token_ids=tuple(range(40, 60))),
}


@pytest.fixture(scope="module")
def pair(tiny_tokenizer: PreTrainedTokenizerBase) -> Pair:
    target = build_llama(len(tiny_tokenizer), layers=3, hidden=128, seed=0)
    return target.requires_grad_(False).bfloat16(), tiny_tokenizer


def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "rounds_at_once", lambda *_: (0, 0))


def what(done: list[Completion]) -> list[Any]:
    """All that an answer says but its seconds."""
    for one in done:
        one.counters.prefill_seconds = one.counters.decode_seconds = 0.0
    return done


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rounds each call made."""
    counts, several = list[int](), rounds.several

    def counted(*args: Any) -> Any:
        found = several(*args)
        counts.append(len(found[0]))
        return found

    monkeypatch.setattr(rounds, "several", counted)
    return counts


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
    assert max(made) == MOST
    one_at_a_time(monkeypatch)
    assert found == what(decoder.generate(TEXTS, WAYS[way])) and len(made) == calls


def test_rows_of_other_laws_share_a_call(
    pair: Pair, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a session of which each row samples its own way."""
    decoder = Decoder(*pair)

    def answered() -> list[Completion]:
        session, requests = decoder.open_session(ROWS, 200), []
        for i, params in enumerate([*WAYS.values()][:4]):
            how = {"params": params, "context": 200, "end_ids": decoder.eos_ids}
            requests.append(open_request(TEXTS[i], i, i, tokenizer=pair[1], **how))
            session.submit(requests[-1])
        while session.busy:
            session.step()
        session.close()
        return what([request.completion for request in requests])

    found = answered()
    assert max(made) == MOST
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

    def answered() -> tuple[list[Completion], list[list[int]]]:
        drafter = LMDrafter(pair[0], len(pair[1])) if kind == "draft" else None
        drafter = drafter or load_drafter(folder, *pair)
        decoder = Decoder(*pair, drafter, policy="table:1-=3", K=3, batch_size=1)
        policy, drafted, propose = decoder.policy, list[list[int]](), drafter.propose

        def next_plan(*_: Any) -> Any:
            assert decoder._batch is not None
            held = decoder._batch.rows.requests[0]
            assert held is not None
            policy.stays = 2 * MOST + 1 - len(held.completion.tokens) % 20
            return None if policy.stays > 0 else policy.plans[-1]

        def noted(request: Round) -> TokenTree:
            tree = propose(request)
            drafted.append(tree.tokens_BN[0].tolist())
            return tree

        policy.next_plan, drafter.propose = next_plan, noted
        done = decoder.generate([TEXTS[0], TEXTS[0]], WAYS[way], indices=[0, 0])
        return what(done), drafted

    found = answered()
    assert max(made) == MOST and len(found[1]) >= 2
    assert kind in KINDS or sum(map(sum, (one.accepted for one in found[0]))) > 0
    one_at_a_time(monkeypatch)
    assert found == answered()


@pytest.mark.parametrize("kind", ["jacobi:3", "exit:2"])
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
    assert max(made) == MOST and any(one.finish_reason == "stop" for one in done.values())
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


@pytest.fixture(scope="module")
def near(pair: Pair) -> PreTrainedModel:
    """A draft of which some tokens are kept."""
    model = build_llama(len(pair[1]), layers=3, hidden=128, seed=0).requires_grad_(False)
    noise = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=noise)
    return model.bfloat16()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["draft", "ngram", "suffix", "recycling", "stand", "exit:2"])
@pytest.mark.parametrize(
    "how", [(1, 4, "fixed"), (ROWS, 2, "fixed"), (2, 3, "table:1-=3")], ids=str
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
        drafter = LMDrafter(near, len(pair[1]), vocab) if kind == "draft" else None
        drafter = drafter or load_drafter(kind, *pair)
        decoder = Decoder(*pair, drafter, K=K, policy=policy, batch_size=batch)
        texts = [TEXTS[0], *TEXTS, TEXTS[0]]
        return what(decoder.generate(texts, WAYS[way], indices=[0, *range(len(TEXTS)), 0]))

    found = answered()
    drafted, kept = (sum(n) for n in zip(*map(counted, found), strict=True))
    # What remembers answers is to hold nothing past the string that ends one.
    alone = WAYS[way].top_k > 0 or (WAYS[way].stop and kind not in ("draft", "ngram", "exit:2"))
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
    tree = drafter.propose(replace(request, lens_B=lens_B, pending_B=pending_B))
    tokens_BN, topology = torch.empty(len(texts), 4, dtype=torch.int64), tree.topology
    state = lens_B, pending_B, lens_B, lens_B, request.active_B
    given = tokens_BN, topology.parent, topology.depth, torch.zeros(len(texts), 4, 10), None
    stops_BM, table_BX = torch.zeros(len(texts), 0), torch.zeros(len(texts), 12)
    made_here = stops_BM, lens_B, table_BX, None, None, None
    draft, _, own = drafter.in_rounds(4, 0.0).call
    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(draft.value)
    whole = rows.round_of((*given, *state, *made_here), 4)
    called(ctypes.cast(own, ctypes.c_void_p), ctypes.addressof(whole))
    assert torch.equal(tokens_BN, tree.tokens_BN)


def first_of_equals(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As C++ takes them, where bf16 makes many alike and topk takes any."""
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], ids[..., :count]


def counted(one: Completion) -> tuple[int, int]:
    """Tokens drafted, and kept."""
    return one.counters.nodes, sum(one.accepted)


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle1": ("eagle1", {}),
    "eagle3": ("eagle3", {"norm_output": True}),
    "eagle3.1": ("eagle3", {"fc_norm": True, "layers": 2}),
    "normed": ("eagle3", {"norm_before_fc": True, "norm_before_residual": True}),
    "mtp": ("mtp", {}),
    "medusa": ("medusa", {"layers": 2}),
    "shared": ("medusa", {"own_heads": False}),
    "hydra": ("hydra", {"layers": 2, "head_bias": True}),
    "hydra++": ("hydra", {"prefixed": True}),
    "block": ("block", {"light": "layer", "last": True, "mask_token": -1}),
    "whole block": ("block", {"light": "layer", "labels": "same", "mask": "full", "layers": 2}),
    "dflash": ("dflash", {}),
    "jetspec": ("jetspec", {"layers": 2}),
}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(("way", "batch"), [("greedy", 1), ("drawn", 1), ("drawn", 2)])
def test_what_a_head_holds_is_what_it_holds_after_one_at_a_time(
    pair: Pair,
    kind: str,
    way: str,
    batch: int,
    made: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Chains, what is kept of them, its states, and its keys and values up to the text's end."""
    name, about = HEADS[kind]
    head = heads(name, pair[0], width=32, **about)
    for weight in head.parameters():  # so small that the noise decides what is kept
        weight.mul_(0.1 if weight.ndim > 1 else 1.0)
    folder = str(ours(tmp_path, head.bfloat16(), *pair))

    def answered() -> tuple[list[Completion], list[Any]]:
        drafter = load_drafter(folder, *pair)
        decoder = Decoder(*pair, drafter, K=4 - batch, batch_size=batch)
        done = decoder.generate(TEXTS[2 : 2 + batch], WAYS[way])
        assert isinstance(drafter, HeadDrafter)
        kept = drafter.pool.kv_2LBSHE if drafter.layer is not None else []
        return what(done), [drafter.state_BH, *kept]

    found, held = answered()
    assert max(made) > 2
    one_at_a_time(monkeypatch)
    again, like = answered()
    assert found == again
    ends = [len(one.prompt_tokens) + len(one.tokens) - 1 for one in found]
    kept = sum(sum(one.accepted) for one in found)
    assert kept > 0 or way == "greedy"
    torch.testing.assert_close(held[0], like[0], rtol=0, atol=0)
    for side, other in zip(held[1:], like[1:], strict=True):
        for row, end in enumerate(ends):
            assert torch.equal(side[:, row, :end], other[:, row, :end])


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
    assert rounds_at_once(runner, 32, WAYS["drawn"]) == (1, 1)  # one in 32 ends soon
    assert rounds_at_once(runner, 16, WAYS["drawn"]) == (2, 2)
    assert rounds_at_once(runner, 1, WAYS["drawn"], 5) == (MOST, MOST + 8)
    assert runner.native is not None
    runner.native.small = False  # a pass then takes far longer than all around it
    assert rounds_at_once(runner, 1, WAYS["drawn"])[0] == 0
