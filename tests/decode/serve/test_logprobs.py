"""Log-probabilities as OpenAI tells them, through the real client: the target's own, streamed and
whole, whatever drafts.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from live_server import Live, live
from saved_drafts import save_draft
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.tokenizer import token_bytes
from draftsmith.train.answers.asks import Ask
from draftsmith.train.answers.endpoint import Endpoint, EndpointSpec

PROMPT = [7, 8, 9]


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target: LlamaForCausalLM,
    tiny_draft: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("draft") / "draft"
    save_draft(folder, tiny_draft, tiny_target, tiny_tokenizer)
    drafts = ("lookup=ngram", "plain=none")
    how = {"K": 3, "policy": "fixed"}  # two calls are then equal to the last bit
    with live(tiny_target, tiny_tokenizer, drafter=str(folder), drafters=drafts, **how) as made:
        yield made


@torch.inference_mode()
def log_p(target: LlamaForCausalLM, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """[A, V], by one pass over prompt and answer."""
    logits_TV = target(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits_TV.log_softmax(-1)


@pytest.mark.parametrize("model", ["tiny", "tiny:lookup", "tiny:plain"])
@pytest.mark.parametrize("law", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.7, "seed": 3}])
def test_a_completion_tells_the_targets_log_probabilities(
    running: Live, model: str, law: dict[str, Any], tiny_target: LlamaForCausalLM
) -> None:
    how = {"model": model, "prompt": PROMPT, "max_tokens": 24, **law, "logprobs": 4}
    beyond = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    client = running.client().completions
    got = client.create(**how, extra_body=beyond).choices[0]
    tokens, told = got.token_ids, got.logprobs
    assert told.tokens == [f"token_id:{token}" for token in tokens]
    log_p_AV = log_p(tiny_target, PROMPT, tokens)
    for place, token in enumerate(tokens):
        assert told.token_logprobs[place] == pytest.approx(float(log_p_AV[place, token]), abs=1e-4)
        ids = {*log_p_AV[place].topk(4).indices.tolist(), token}
        want = {f"token_id:{which}": float(log_p_AV[place, which]) for which in ids}
        assert told.top_logprobs[place] == pytest.approx(want, abs=1e-4)
    chunks = [chunk.choices[0].logprobs for chunk in client.create(stream=True, **how)]
    for part in ("token_logprobs", "text_offset"):
        pieces = [one for chunk in chunks if chunk is not None for one in getattr(chunk, part)]
        # Rounds of another call may be of other sizes, which round differently.
        assert pieces == pytest.approx(getattr(told, part), abs=1e-4)
    assert sum(chunk is not None for chunk in chunks) > 1


def test_a_chat_tells_them_with_bytes_that_make_its_text(
    running: Live, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    how: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 1.2,
        "seed": 4,
        "max_tokens": 60,
        "logprobs": True,
        "top_logprobs": 3,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }
    chats = running.client().chat.completions
    got = chats.create(**how).choices[0]
    told = got.logprobs.content
    assert [len(one.top_logprobs) for one in told] == [3] * 60
    data = bytes(byte for one in told for byte in one.bytes)
    assert data.decode(errors="replace") == tiny_tokenizer.decode(got.token_ids)
    assert any(one.token.startswith("bytes:\\x") for one in told), "no part of a character"
    for one in told:
        best = one.top_logprobs[0]
        assert one.logprob <= best.logprob <= 0
        assert sum(math.exp(other.logprob) for other in one.top_logprobs) <= 1 + 1e-6
    chunks = [chunk.choices[0] for chunk in chats.create(stream=True, **how)]
    assert [one for c in chunks if c.logprobs is not None for one in c.logprobs.content] == told
    bare = chats.create(**{**how, "top_logprobs": None}).choices[0].logprobs.content
    assert [one.logprob for one in bare] == [one.logprob for one in told]
    assert all(one.top_logprobs == [] for one in bare)
    none = chats.create(**{**how, "logprobs": False, "top_logprobs": None}).choices[0]
    assert none.logprobs is None and none.token_ids == got.token_ids


def test_offsets_count_characters(running: Live, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 80, "temperature": 1.5, "seed": 1}
    body |= {"logprobs": 0, "ignore_eos": True, "return_token_ids": True}
    choice = running.post(body).json()["choices"][0]
    told, tokens = choice["logprobs"], choice["token_ids"]
    for place, offset in enumerate(told["text_offset"]):
        before = b"".join(token_bytes(t, tiny_tokenizer) or b"" for t in tokens[:place])
        goes_on = (token_bytes(tokens[place], tiny_tokenizer) or b"x")[0] & 0xC0 == 0x80
        assert offset == sum(byte & 0xC0 != 0x80 for byte in before) - goes_on
    assert [*map(len, told["top_logprobs"])] == [1] * 80
    assert len({*told["text_offset"]}) > 40


def test_our_own_client_learns_from_them(
    running: Live, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """`prepare endpoint.top_logprobs=6` reads this server as it reads vLLM."""
    ask = Ask(index=0, ids=PROMPT, text="", messages=(), seed=1, top_logprobs=6)
    endpoint = Endpoint(EndpointSpec(url=running.url, model="tiny", retries=0), tiny_tokenizer)
    params = SamplingParams(temperature=1.0, max_new_tokens=12)
    [reply] = endpoint.answers([ask], params)
    log_p_AV = log_p(tiny_target, PROMPT, reply["token_ids"])
    for listed, log_p_V in zip(reply["top_logprobs"], log_p_AV, strict=True):
        best = log_p_V.topk(6).indices.tolist()
        assert list(listed)[:6] == best
        assert listed == pytest.approx({k: float(log_p_V[k]) for k in listed}, abs=1e-4)
