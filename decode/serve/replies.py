"""Answers and errors in OpenAI's shape."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.decode.engine.request import Completion

DONE = "data: [DONE]\n\n"
RETRY_S = 1  # when to come back after 429 and 503

# What OpenAI calls the kinds of errors, by their status; any other is as 400.
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """What a client gets in place of an answer. param: the field that is wrong; code: for programs;
    retry_s: when to come back.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.param, self.code, self.retry_s = param, code, retry_s

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": printable(self.message),
                "type": KINDS.get(self.status, KINDS[400]),
                "param": None if self.param is None else printable(self.param),
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}


def printable(text: str) -> str:
    """What clients sent may hold halves of characters, which no answer can carry back."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def event(what: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(what, ensure_ascii=False)}\n\n"


@dataclass
class ApiReply:
    """One request's answer, whole or in pieces: its head, and how its choices are written.
    prompt_tokens: of its prompts, each counted once; done: its finished completions.
    """

    model: str
    chat: bool
    with_ids: bool
    with_usage: bool
    prompt_tokens: int
    done: list[Completion] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def head(self, *, chunk: bool = False) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    @property
    def usage(self) -> dict[str, int]:
        """Tokens read and written; a stop token is one of them."""
        written = sum(len(made.tokens) for made in self.done)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
        }

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """All choices at once."""
        self.done = list(completions)
        choices = []
        for index, made in enumerate(completions):
            said: dict[str, Any] = {"text": made.text}
            if self.chat:
                said = {"message": {"role": "assistant", "content": made.text, "refusal": None}}
            choices.append(self._choice(index, said, made.tokens, made.finish_reason))
        return self.head() | {"choices": choices, "usage": self.usage}

    def first(self, index: int) -> str:
        """The chunk that opens a chat's choice: who speaks."""
        return self._chunk([self._choice(index, {"delta": {"role": "assistant", "content": ""}})])

    def piece(self, index: int, text: str, tokens: list[int], reason: str | None) -> str:
        """A chunk of one choice; the last one has a reason."""
        said: dict[str, Any] = {"text": text}
        if self.chat:
            said = {"delta": {"content": text} if text else {}}
        return self._chunk([self._choice(index, said, tokens, reason)])

    def last(self) -> str:
        """The chunk that counts the tokens, where it was asked for, and the end."""
        if not self.with_usage:
            return DONE
        return event(self.head(chunk=True) | {"choices": [], "usage": self.usage}) + DONE

    def _choice(
        self,
        index: int,
        said: dict[str, Any],
        tokens: Sequence[int] = (),
        reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, **said, "logprobs": None, "finish_reason": reason}
        return choice | {"token_ids": list(tokens)} if self.with_ids else choice

    def _chunk(self, choices: list[dict[str, Any]]) -> str:
        usage = {"usage": None} if self.with_usage else {}
        return event(self.head(chunk=True) | {"choices": choices} | usage)
