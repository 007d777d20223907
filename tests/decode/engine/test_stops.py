"""Stop strings end an answer at the same token and character however its tokens arrive."""

import random
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import (
    UNFINISHED,
    AnswerText,
    Request,
    before_stop,
    held_back,
    open_request,
)
from draftsmith.decode.sampling import SamplingParams


@pytest.fixture(scope="session")
def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece models have it: a leading space that only the first word drops, bytes for
    what is no piece.
    """
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁the", "▁stop", "st", "op", "s"]
    bpe = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    bpe.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>")


def obvious(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], stop: tuple[str, ...]
) -> tuple[list[int], str]:
    """Tokens kept and text, by decoding everything after every token."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count])
        if any(s in text for s in stop):
            return tokens[:count], before_stop(text, stop)
    return tokens, tokenizer.decode(tokens)


def chunks(tokens: list[int], rng: random.Random, most: int) -> Iterator[list[int]]:
    at = 0
    while at < len(tokens):
        size = rng.randint(1, most)
        yield tokens[at : at + size]
        at += size


def answer(
    tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...], pieces: Iterator[list[int]]
) -> tuple[Request, list[str]]:
    """The request after an answer that arrives in `pieces`, and the texts streamed."""
    request = open_request(
        [5], 0, 0, tokenizer=tokenizer, params=SamplingParams(stop=stop), context=10_000
    )
    streamed = []
    for piece in pieces:
        kept, stopped = request.cut(piece)
        request.completion.tokens += kept
        if stopped:
            break
        streamed.append(request.next_text(finished=False))
    request.finish()
    streamed.append(request.next_text(finished=True))
    return request, streamed


WORDS = [
    "stop",
    " stop",
    "st",
    "op",
    "\n\n",
    "\n",
    "the ",
    "é",
    "日本",
    "🙂",
    " ",
    "s",
    "abcab",
    "c",
]
STOPS = [(), ("stop",), ("\n\n", "op\n"), ("🙂",), ("本", "abcaba"), ("s s", "st", "é日"), ("ss",)]
# Bytes that are no character, or not yet, are text like any other to a stop string that holds them.
STOPS += [(f"{UNFINISHED}s", f"t{UNFINISHED}"), (f"{UNFINISHED}{UNFINISHED}",)]


@pytest.mark.parametrize("stop", STOPS, ids=str)
@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_equals_decoding_everything_after_every_token(
    tiny_tokenizer: PreTrainedTokenizerBase,
    metaspace_tokenizer: PreTrainedTokenizerFast,
    kind: str,
    stop: tuple[str, ...],
) -> None:
    rng = random.Random(str(stop))
    stopped = 0
    for _ in range(60):
        words = [rng.choice(WORDS) for _ in range(rng.randint(1, 24))]
        if kind == "bytes":
            tokenizer = tiny_tokenizer
            tokens = tokenizer("".join(words)).input_ids
            # A lone byte that never becomes a character.
            tokens.insert(rng.randint(0, len(tokens)), tokenizer.convert_tokens_to_ids("Ã"))
        else:
            tokenizer = metaspace_tokenizer
            tokens = [
                i
                for word in words
                for i in metaspace_tokenizer.convert_tokens_to_ids(
                    [word] if word in ("st", "op", "s") else [f"<0x{b:02X}>" for b in word.encode()]
                )
            ]
        kept, text = obvious(tokenizer, tokens, stop)
        for most in (1, 3, 8):
            request, streamed = answer(tokenizer, stop, chunks(tokens, rng, most))
            assert (request.completion.tokens, request.completion.text) == (kept, text)
            assert "".join(streamed) == text
        stopped += len(kept) < len(tokens)
    assert (stopped > 3) == bool(stop)


def test_nothing_of_a_stop_string_is_streamed(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tiny_tokenizer("abc<STxy<STOP>z").input_ids
    request, streamed = answer(tiny_tokenizer, ("<STOP>",), ([t] for t in tokens))
    shown = ""
    for piece in streamed:
        shown += piece
        assert "abc<STxy".startswith(shown)
    assert shown == request.completion.text == "abc<STxy"
    assert tiny_tokenizer.decode(request.completion.tokens).endswith("<STOP>")
    # What might have begun one is shown once it hasn't.
    request, streamed = answer(tiny_tokenizer, ("<STOP>",), ([t] for t in tokens[:-4]))
    assert "".join(streamed) == request.completion.text
    assert request.completion.finish_reason == "length"


def test_spaces_at_the_seam(metaspace_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = metaspace_tokenizer.convert_tokens_to_ids(["▁the", "▁stop", "▁", "▁the", "s"])
    request, streamed = answer(metaspace_tokenizer, (), ([t] for t in ids))
    assert "".join(streamed) == request.completion.text == "the stop  thes"
    kept, text = answer(metaspace_tokenizer, (" stop",), ([t] for t in ids))[0], "the"
    assert (kept.completion.tokens, kept.completion.text) == (ids[:2], text)


def test_the_first_of_several_stop_strings_cuts(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tiny_tokenizer("one two three").input_ids
    for stop in (("three", "two"), ("two", "three"), ("o three", "two")):
        for most in (1, 20):
            made = answer(tiny_tokenizer, stop, chunks(tokens, random.Random(0), most))[0]
            assert made.completion.text == "one "
            assert made.completion.finish_reason == "stop"


def test_a_round_reads_a_window_not_the_answer(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    class Counting:
        longest = 0

        def decode(self, tokens: list[int]) -> str:
            self.longest = max(self.longest, len(tokens))
            return tiny_tokenizer.decode(tokens)

    counting = Counting()
    text = AnswerText(counting, ("never",))
    tokens = tiny_tokenizer("import os, sys; print(日本) " * 40).input_ids
    for piece in chunks(tokens, random.Random(1), 5):
        assert text.add(piece) is None
    assert text.text == tiny_tokenizer.decode(tokens)
    assert counting.longest <= 20


def test_held_back_by_hand() -> None:
    assert held_back("abc", ()) == 0
    assert held_back("abc", ("cd",)) == 1
    assert held_back("abab", ("abac", "babx")) == 3
    assert held_back("b", ("b",)) == 0  # whole: found, not held
    assert before_stop("xayb", ("b", "a")) == "x"
    assert before_stop("xayb", ("c",)) == "xayb"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_end_alike_whoever_drafts(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, temperature: float
) -> None:
    prompts = ["def main(", "import os", "a", "class Foo:", "x = 1", "for"]
    params = SamplingParams(temperature, max_new_tokens=40, seed=4)
    free = Decoder(tiny_target, tiny_tokenizer, batch_size=6).generate(prompts, params)
    stop = tuple(dict.fromkeys((free[0].text[9:12], free[1].text[:1], free[2].text[20:22])))
    asked = SamplingParams(temperature, max_new_tokens=40, seed=4, stop=stop)
    expected = [obvious(tiny_tokenizer, made.tokens, stop) for made in free]
    assert (
        sum(len(kept) < len(made.tokens) for (kept, _), made in zip(expected, free, strict=True))
        > 2
    )
    for drafter in (None, LMDrafter(tiny_target, len(tiny_tokenizer))):
        for batch in (1, 2, 6):
            decoder = Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=batch, K=6)
            streamed = dict.fromkeys(range(len(prompts)), "")
            for event in decoder.stream(prompts, asked):
                streamed[event.index] += event.text
                made = event.completion
                if made is not None:
                    kept, text = expected[made.index]
                    stopped = any(s in tiny_tokenizer.decode(kept) for s in stop)
                    assert (made.tokens, made.text) == (kept, text.removesuffix("<|end|>"))
                    assert made.finish_reason == ("stop" if stopped or kept[-1] == 0 else "length")
                    assert streamed[made.index] == made.text
                    assert len(made.accepted) == len(kept) == made.counters.emitted + 1
