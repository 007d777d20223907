"""Answers in the shape of OpenAI's /v1/responses: one message of one text, and its events."""

import itertools
import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

from draftsmith.decode.engine.request import Completion, Event
from draftsmith.decode.serve.replies import ApiError, BytesOf, Json, TokenNames
from draftsmith.decode.serve.schemas import ResponseAsked


class ResponseReply:
    """One request's answer, whole or as events. prompt_tokens: of instructions and input."""

    def __init__(self, asked: ResponseAsked, prompt_tokens: int, bytes_of: BytesOf) -> None:
        self.names, self.prompt_tokens = TokenNames(bytes_of), prompt_tokens
        self.done: dict[int, Completion] = {}  # the one choice, once it has ended
        self._numbers = itertools.count()  # of events
        self._opened = False
        self.item: Json = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        said = asked.text.model_dump(by_alias=True, exclude_none=True) if asked.text else {}
        self.head: Json = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": asked.model,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "top_logprobs": asked.top_logprobs or 0,
            # What this server does of all that can be said here.
            "background": False,
            "error": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}} | said,
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
        }

    def whole(self) -> Json:
        """The response with its message."""
        made = self.done[0]
        read, written = self.prompt_tokens, len(made.tokens)
        usage = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        }
        cut = {"reason": "max_output_tokens"} if made.finish_reason == "length" else None
        about = {"status": self._status, "incomplete_details": cut}
        return self.head | about | {"output": [self._message()], "usage": usage}

    def chunks(self, news: Event) -> Iterator[str]:
        """What is told of its news, in the order of OpenAI's."""
        at = {"item_id": self.item["id"], "output_index": 0, "content_index": 0}
        if not self._opened:
            self._opened = True
            none: Json = {"incomplete_details": None, "output": [], "usage": None}
            begun = {"response": self.head | {"status": "in_progress"} | none}
            yield self._event("response.created", begun)
            yield self._event("response.in_progress", begun)
            item = self.item | {"status": "in_progress", "content": []}
            yield self._event("response.output_item.added", {"output_index": 0, "item": item})
            yield self._event("response.content_part.added", at | {"part": part("", [])})
        logprobs = self.names.entries(news.tokens, news.listed)
        if news.text or logprobs:
            delta = {"delta": news.text, "logprobs": logprobs}
            yield self._event("response.output_text.delta", at | delta)
        if news.completion is not None:
            self.done[0] = news.completion
            item = self._message()
            [said] = item["content"]
            text = {"text": said["text"], "logprobs": said["logprobs"]}
            yield self._event("response.output_text.done", at | text)
            yield self._event("response.content_part.done", at | {"part": said})
            yield self._event("response.output_item.done", {"output_index": 0, "item": item})

    def last(self) -> str:
        """The event that ends a stream: the whole response."""
        return self._event(f"response.{self._status}", {"response": self.whole()})

    def failed(self, error: ApiError) -> str:
        """What ends a stream in place of `last`."""
        told = error.body["error"]
        return self._event("error", {name: told[name] for name in ("code", "message", "param")})

    @property
    def _status(self) -> str:
        return "incomplete" if self.done[0].finish_reason == "length" else "completed"

    def _message(self) -> Json:
        made = self.done[0]
        said = part(made.text, self.names.entries(made.tokens, made.listed))
        return self.item | {"status": self._status, "content": [said]}

    def _event(self, kind: str, what: Json) -> str:
        data = {"type": kind, "sequence_number": next(self._numbers), **what}
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"


def part(text: str, logprobs: list[Any]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
