"""A request's opening, its counts, and its end."""

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Counters, Prompt, Request, open_request
from draftsmith.decode.sampling import SamplingParams

END = 0  # of the tests' tokenizer


def opened(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, **params: object) -> Request:
    return open_request(
        prompt,
        3,
        3,
        tokenizer=tokenizer,
        params=SamplingParams(**params),
        context=512,
        end_ids=(END,),
    )


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt 3: got no tokens"),
        ([], "prompt 3: got no tokens"),
        ([1] * 512, "prompt 3: got 512 tokens, expected fewer than the context of 512"),
        ([5, 99999], "prompt 3: .*another tokenizer"),
        ([5, -1], "prompt 3: .*another tokenizer"),
        ([5, END], r"prompt 3: got '<\|end\|>' as its last token.*take the token off"),
        ("x = 1<|end|>", r"prompt 3: got '<\|end\|>' as its last token"),
    ],
)
def test_bad_prompts_are_refused(
    tiny_tokenizer: PreTrainedTokenizerBase, prompt: Prompt, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        opened(tiny_tokenizer, prompt)


def test_an_end_token_may_stand_inside_or_be_ignored(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert opened(tiny_tokenizer, [END, 5]).completion.prompt_tokens == [END, 5]
    assert opened(tiny_tokenizer, [5, END], ignore_eos=True).completion.prompt_tokens == [5, END]


def test_the_decoder_refuses_prompts_that_have_ended(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ValueError, match=r"prompt 1: .*as its last token"):
        Decoder(tiny_target, tiny_tokenizer).generate([[5], [5, END]], SamplingParams())


def test_the_limit_is_what_the_context_leaves(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    assert opened(tiny_tokenizer, [5] * 500, max_new_tokens=50).limit == 12
    assert opened(tiny_tokenizer, [5] * 400, max_new_tokens=50).limit == 50


@pytest.mark.parametrize(
    ("text", "end", "stop", "reason", "shown"),
    [
        ("one two", [], (), "length", "one two"),
        ("one two", [END], (), "stop", "one two"),
        ("one two", [], ("tw",), "stop", "one "),
        ("one two", [END], ("end|",), "stop", "one two"),  # the end token is no text
    ],
)
def test_the_end_of_an_answer(
    tiny_tokenizer: PreTrainedTokenizerBase,
    text: str,
    end: list[int],
    stop: tuple[str, ...],
    reason: str,
    shown: str,
) -> None:
    request = opened(tiny_tokenizer, "a", stop=stop)
    kept, stopped = request.cut([*tiny_tokenizer(text).input_ids, *end])
    assert stopped == bool(stop)
    request.completion.tokens += kept
    request.finish()
    made = request.completion
    assert (made.finish_reason, made.text, made.error) == (reason, shown, "")
    assert request.next_text(finished=True) == shown


def test_a_failed_request_keeps_what_it_has(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    request = opened(tiny_tokenizer, "a")
    request.finish("NaN logits in row 2")
    assert (request.completion.finish_reason, request.completion.text) == ("error", "")
    assert request.completion.error == "NaN logits in row 2"


def test_counters_tell_levels_from_nodes() -> None:
    counters = Counters()
    counters.record(3, 2, 3, nodes=12)
    counters.record(2, 2, 1)
    assert (counters.rounds, counters.drafted, counters.nodes, counters.emitted) == (2, 5, 14, 4)
    assert counters.histogram == [0, 1, 1, 0]
    assert counters.reached == [2, 2, 1]
