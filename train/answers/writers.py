"""Who writes an answer to a prompt: the decoder here, or a server."""

from collections.abc import Iterator

from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.train.answers.asks import Ask
from draftsmith.train.answers.endpoint import Endpoint
from draftsmith.train.text.prepared import Answer


def write_answers(
    writer: Decoder | Endpoint, asks: list[Ask], params: SamplingParams
) -> Iterator[Answer]:
    """Answers as they finish; a row that is free, here or there, takes the next prompt at once."""
    if isinstance(writer, Endpoint):
        return _by_server(writer, asks, params)
    return _by_decoder(writer, asks, params)


def _by_decoder(decoder: Decoder, asks: list[Ask], params: SamplingParams) -> Iterator[Answer]:
    events = decoder.stream([ask.ids for ask in asks], params, [ask.index for ask in asks])
    for event in events:
        if event.completion:
            ask, made = asks[event.index], event.completion
            yield _answer(ask, made.tokens, made.text, made.finish_reason)


def _by_server(endpoint: Endpoint, asks: list[Ask], params: SamplingParams) -> Iterator[Answer]:
    for ask, reply in endpoint.answers(asks, params):
        answer = _answer(ask, reply.token_ids, reply.text, reply.finish_reason)
        exactness = {"mismatch": reply.mismatch, "prompt_mismatch": reply.prompt_mismatch}
        told = {"top_logprobs": reply.top_logprobs} if reply.top_logprobs else {}
        yield answer | {"retokenised": reply.retokenised} | exactness | told


def _answer(ask: Ask, tokens: list[int], text: str, finish_reason: str) -> Answer:
    return {
        "index": ask.index,
        "seed": ask.seed,
        "prompt_ids": ask.ids,
        "token_ids": tokens,
        "text": text,
        "finish_reason": finish_reason,
    }
