"""Speculative retrieval: the answers of plain iterative retrieval, with fewer calls waited for."""

import json
import math
from pathlib import Path

import pytest
import speculative_retrieval
from head_folders import on_disk
from speculative_retrieval import Answerer, Pace, Retriever, Retrieving, strides_ahead
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith import Decoder

PROMPTS = [[9, 40, 12, 60, 33], [70, 71, 72, 9], [5, 100, 44]]


@pytest.fixture
def decoder(tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> Decoder:
    return Decoder(tiny_target, tiny_tokenizer, batch_size=1)


@pytest.fixture
def documents(decoder: Decoder) -> list[str]:
    """Of words that a random model says: one word of its vocabulary each, and what is beside it."""
    ids = range(20, 300)
    return [str(decoder.tokenizer.decode([i, 320 - i, i])) + f" d{i}" for i in ids]


def test_scores_are_bm25s() -> None:
    retriever = Retriever(["a a b", "b c", "c"])
    rare = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))  # of b and c, each in two of three
    by_hand = rare * 1 * 2.5 / (1 + 1.5 * (1 - 0.75 + 0.75 * 3 / 2))
    assert retriever.score({"b": 1, "d": 1}, 0) == pytest.approx(by_hand)  # type: ignore[arg-type]
    assert retriever.search(["a", "c", "z"], 2) == [[0, 1], [2, 1], [0, 1]] and retriever.calls == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_answers_are_plain_retrievals(
    decoder: Decoder, documents: list[str], temperature: float, ahead: int
) -> None:
    how = Retrieving("", "", "", temperature=temperature, ahead=ahead, query_tokens=6)
    answerer = Answerer(decoder, documents, how)
    plain = [answerer.plain(prompt, i) for i, prompt in enumerate(PROMPTS)]
    calls, answerer.retriever.calls = answerer.retriever.calls, 0
    assert [answerer.speculative(prompt, i) for i, prompt in enumerate(PROMPTS)] == plain
    if ahead == 4:
        assert answerer.retriever.calls < calls


def test_unverified_guesses_would_change_answers(
    decoder: Decoder, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken twin: what comes from the cache is believed."""
    answerer = Answerer(decoder, documents, Retrieving("", "", "", ahead=4, query_tokens=6))
    plain = [answerer.plain(prompt, i) for i, prompt in enumerate(PROMPTS)]
    known: list[int] = []

    def believed(queries: list[str], k: int) -> list[list[int]]:
        if not known:
            known.extend(answerer.retriever.best(queries[0], range(len(documents)), 3))
        return [answerer.retriever.best(query, known, 3) for query in queries]

    monkeypatch.setattr(answerer.retriever, "search", believed)
    assert [answerer.speculative(prompt, i) for i, prompt in enumerate(PROMPTS)] != plain


def test_the_pace_is_the_best_of_all() -> None:
    for sure in (0.0, 0.3, 0.6):
        for a, b in ((1.0, 0.1), (1.0, 5.0), (0.1, 10.0)):
            rates = [(1 - sure**s) / (s * a + b) for s in range(1, 17)]
            found = strides_ahead(sure, a, b)
            assert rates[found - 1] == pytest.approx(max(rates))
    pace = Pace()
    assert pace.ahead() == 1, "nothing is known yet"
    pace.observe(right=1, failed=False, stride=0.1, call=10.0)
    sure = pace.ahead()
    pace.observe(right=0, failed=True, stride=0.1, call=10.0)
    assert sure > pace.ahead() >= 2


def test_the_script_tells_calls_and_sameness(
    tmp_path: Path,
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    documents: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = on_disk(tmp_path / "target", tiny_target, tiny_tokenizer)
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"text": d}) for d in documents))
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": f"w{i}"}) for i in range(3)))
    where = [f"documents={tmp_path / 'd.jsonl'}", f"prompts={tmp_path / 'p.jsonl'}"]
    how = ["split=all", "limit=2", "max_new_tokens=12", "ahead=2"]
    speculative_retrieval.main([f"target={target}", *where, *how])
    assert "2 of 2 answers the same" in capsys.readouterr().out
