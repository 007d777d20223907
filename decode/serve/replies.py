"""Answers and errors in OpenAI's shape."""

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.decode.engine.request import UNFINISHED, Completion, Event, Listed
from draftsmith.decode.serve.schemas import ChatAsked, CompletionAsked

Json = dict[str, Any]
DONE = "data: [DONE]\n\n"

# By status: what OpenAI calls the kind of error, and when it comes. Any other is as 400.
STATUSES = {
    400: ("invalid_request_error", "malformed, unknown, out of range, not offered, or too long"),
    401: ("authentication_error", "wrong key"),
    404: ("not_found_error", "unknown model"),
    408: ("timeout_error", "the body didn't arrive in time"),
    413: ("invalid_request_error", "the body is too large"),
    429: ("rate_limit_error", "the queue is full"),
    500: ("server_error", "decoding failed"),
    503: ("service_unavailable_error", "the server is about to end"),
    504: ("timeout_error", "the answer took too long"),
}


class ApiError(Exception):
    """What a client gets in place of an answer; with 429 and 503 also when to come back. param: the
    field that is wrong; code: for programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"Retry-After": "1"} if status in (429, 503) else {}
        told = {"message": printable(message), "type": STATUSES.get(status, STATUSES[400])[0]}
        self.body = {"error": {**told, "param": param and printable(param), "code": code}}


def printable(text: str) -> str:
    """What clients sent may hold halves of characters, which no answer can carry back."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def event(what: Json) -> str:
    return f"data: {json.dumps(what, ensure_ascii=False)}\n\n"


BytesOf = Callable[[int], bytes | None]  # what a token adds to a text, where that is known


def spelled(data: bytes | None) -> str:
    """A token's text, or where it isn't whole characters its bytes, as OpenAI writes them."""
    if data is None:
        return UNFINISHED
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + data.decode(errors="backslashreplace")


@dataclass
class TokenNames:
    """How tokens are called where their log-probabilities are told; by_id: as `token_id:5`."""

    bytes_of: BytesOf
    by_id: bool = False

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.by_id else spelled(self.bytes_of(token))

    def entry(self, token: int, log_p: float) -> Json:
        data = self.bytes_of(token)
        told = {"token": self.name(token), "logprob": log_p}
        return told | {"bytes": None if data is None else list(data)}

    def entries(self, tokens: Sequence[int], listed: Sequence[Listed]) -> list[Json]:
        """Each token, and the likeliest ones in its place; nothing where nothing is listed."""
        return [
            self.entry(token, one.log_p)
            | {"top_logprobs": [self.entry(*pair) for pair in one.likeliest]}
            for token, one in zip(tokens, listed, strict=bool(listed))
        ]


class ApiReply:
    """One request's answer, whole or in chunks. prompt_tokens: of each prompt, counted once."""

    def __init__(
        self, asked: CompletionAsked | ChatAsked, prompt_tokens: int, bytes_of: BytesOf
    ) -> None:
        self.chat, self.with_ids = isinstance(asked, ChatAsked), bool(asked.return_token_ids)
        self.lists = asked.top is not None
        self.names = TokenNames(bytes_of, bool(asked.return_tokens_as_token_ids))
        self._offsets: Counter[int] = Counter()  # characters of each choice's tokens
        options = asked.stream_options
        self.with_usage = options is not None and bool(options.include_usage)
        self.prompt_tokens = prompt_tokens
        self.done: dict[int, Completion] = {}  # by choices
        self._opened: set[int] = set()  # a chat's choices of which was said who speaks
        name, kind = "cmpl", "text_completion"
        if self.chat:
            name, kind = "chatcmpl", "chat.completion" + (".chunk" if asked.stream else "")
        self.head: Json = {"id": f"{name}-{uuid.uuid4().hex}", "object": kind}
        self.head |= {"created": int(time.time()), "model": asked.model}

    @property
    def usage(self) -> dict[str, int]:
        """Tokens read and written; a stop token is one of them."""
        read, written = self.prompt_tokens, sum(len(made.tokens) for made in self.done.values())
        counts = {"prompt_tokens": read, "completion_tokens": written}
        return counts | {"total_tokens": read + written}

    def whole(self) -> Json:
        """All choices at once."""
        choices = []
        for index, made in sorted(self.done.items()):
            said: Json = {"text": made.text}
            if self.chat:
                said = {"message": {"role": "assistant", "content": made.text, "refusal": None}}
            how = (index, said, made.tokens, made.listed, made.finish_reason)
            choices.append(self._choice(*how))
        return self.head | {"choices": choices, "usage": self.usage}

    def chunks(self, news: Event) -> Iterator[str]:
        """What is told of one choice's news; its last chunk has a reason."""
        index, made = news.index, news.completion
        if self.chat and index not in self._opened:
            self._opened.add(index)
            yield self._chunk(self._choice(index, {"delta": {"role": "assistant", "content": ""}}))
        if news.text or made is not None or self.with_ids or news.listed:
            said: Json = {"text": news.text}
            if self.chat:
                said = {"delta": {"content": news.text} if news.text else {}}
            reason = None if made is None else made.finish_reason
            yield self._chunk(self._choice(index, said, news.tokens, news.listed, reason))
        if made is not None:
            self.done[index] = made

    def last(self) -> str:
        """The chunk that counts the tokens, where it was asked for, and the end."""
        if not self.with_usage:
            return DONE
        return event(self.head | {"choices": [], "usage": self.usage}) + DONE

    def failed(self, error: ApiError) -> str:
        """What ends a stream in place of `last`."""
        return event(error.body)

    def _choice(
        self,
        index: int,
        said: Json,
        tokens: Sequence[int] = (),
        listed: Sequence[Listed] = (),
        reason: str | None = None,
    ) -> Json:
        told = None
        if self.lists and tokens:
            told = (self._of_chat if self.chat else self._of_text)(index, tokens, listed)
        choice = {"index": index, **said, "logprobs": told, "finish_reason": reason}
        return choice | {"token_ids": list(tokens)} if self.with_ids else choice

    def _of_chat(self, _: int, tokens: Sequence[int], listed: Sequence[Listed]) -> Json:
        return {"content": self.names.entries(tokens, listed), "refusal": None}

    def _of_text(self, index: int, tokens: Sequence[int], listed: Sequence[Listed]) -> Json:
        """A completion's: of each place the likeliest tokens, and the one that is there."""
        told: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, one in zip(tokens, listed, strict=True):
            # Bytes of the form 10xxxxxx go on with a character.
            begins = [byte & 0xC0 != 0x80 for byte in self.names.bytes_of(token) or b""]
            told["tokens"].append(self.names.name(token))
            told["token_logprobs"].append(one.log_p)
            top: dict[str, float] = {}
            for which, log_p in (*one.likeliest, (token, one.log_p)):
                top.setdefault(self.names.name(which), log_p)
            told["top_logprobs"].append(top)
            told["text_offset"].append(self._offsets[index] - (False in begins[:1]))
            self._offsets[index] += sum(begins)
        return told

    def _chunk(self, choice: Json) -> str:
        usage = {"usage": None} if self.with_usage else {}
        return event(self.head | {"choices": [choice]} | usage)
