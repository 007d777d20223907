"""From a checked request to its answer, whole or streamed: jobs for the engine thread, and what it
tells of them. Here is where a client that leaves, or a time limit, ends what it asked for.
"""

import asyncio
import copy
import functools
import itertools
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from draftsmith.decode.engine.request import Event, open_request
from draftsmith.decode.prompts.chat import chat_prompt
from draftsmith.decode.serve.engine_thread import Job, Lane, Service
from draftsmith.decode.serve.replies import ApiError, ApiReply
from draftsmith.decode.serve.responses import ResponseReply
from draftsmith.decode.serve.schemas import (
    ChatAsked,
    CompletionAsked,
    Limits,
    Prompt,
    ResponseAsked,
)
from draftsmith.models.tokenizer import token_bytes

Asked = CompletionAsked | ChatAsked | ResponseAsked
Reply = ApiReply | ResponseReply
GRACE_S = 5.0  # for the last words of a stream that took too long


class Talk:
    """What is heard of one request's answers, until there is no more to come."""

    def __init__(self, service: Service, seconds: float) -> None:
        self.service = service
        self.jobs: list[Job] = []
        self._heard: asyncio.Queue[Event | ApiError] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.deadline = self._loop.time() + seconds

    def hear(self, news: Event | ApiError) -> None:
        """Called by any thread."""
        with suppress(RuntimeError):  # the loop has ended: nobody is left to tell
            self._loop.call_soon_threadsafe(self._heard.put_nowait, news)

    async def watch(self, request: Request) -> None:
        """Hear of it when the client leaves."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.hear(ApiError(400, "the client has left"))  # nobody reads it

    async def next(self) -> Event:
        """The next news; ApiError where there is no more to come."""
        try:
            async with asyncio.timeout_at(self.deadline):
                news = await self._heard.get()
        except TimeoutError as error:
            why = "the answer took longer than this server allows"
            raise ApiError(504, why, code="timeout") from error
        if isinstance(news, ApiError):
            raise news
        return news

    async def whole(self, reply: Reply, news: Event) -> dict[str, object]:
        """All choices, once every one has ended, which is all that is told of each."""
        while True:
            assert news.completion is not None, "of whole answers the end alone is told"
            reply.done[news.index] = news.completion
            if len(reply.done) == len(self.jobs):
                return reply.whole()
            news = await self.next()

    async def pieces(self, reply: Reply, news: Event) -> AsyncIterator[str]:
        """The chunks of a streamed answer. An error ends them as an event of its own."""
        while True:
            for chunk in reply.chunks(news):
                yield chunk
            if len(reply.done) == len(self.jobs):
                yield reply.last()
                return
            try:
                news = await self.next()
            except ApiError as error:
                yield reply.failed(error)
                return

    def close(self) -> None:
        """End what is still on its way."""
        self.service.cancel(self.jobs)


class EventStream(StreamingResponse):
    """Server-sent events; at its end, however it comes, nothing goes on for nobody."""

    def __init__(self, events: AsyncIterator[str], talk: Talk) -> None:
        headers = {"Cache-Control": "no-cache"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self.talk = talk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # A client that doesn't read holds its stream in the middle of a piece.
            async with asyncio.timeout_at(self.talk.deadline + GRACE_S):
                await super().__call__(scope, receive, send)
        finally:
            self.talk.close()


class Answers:
    """Asks the engine on behalf of HTTP requests."""

    def __init__(
        self, service: Service, tokenizer: PreTrainedTokenizerBase, limits: Limits
    ) -> None:
        self.service, self.limits = service, limits
        # One of its own: what another thread decodes with must not be changed, as some calls do.
        self.tokenizer, self._lock = copy.deepcopy(tokenizer), threading.Lock()
        self._numbers = itertools.count()  # of answers, for the noise of those without a seed
        self.bytes_of = functools.cache(self._bytes_of)

    async def answer(self, asked: Asked, request: Request) -> Response:
        """The whole answer, or a stream of it; ApiError for what can't be had."""
        talk = Talk(self.service, self.limits.timeout_s)
        lane = self.lane(asked.model, asked.draft)
        reply = await asyncio.to_thread(self.open, asked, lane, talk)
        self.service.submit(talk.jobs)
        watch = asyncio.create_task(talk.watch(request))
        try:
            # Until something has been decoded, an error can still have its status.
            first = await talk.next()
            if asked.stream:  # which looks for itself whether the client is there
                return EventStream(talk.pieces(reply, first), talk)
            return JSONResponse(await talk.whole(reply, first))
        except BaseException:
            talk.close()
            raise
        finally:
            watch.cancel()

    def lane(self, model: str, draft: str | None = None) -> Lane:
        """The lane of a model, or of the plain model and a draft's tag; else ApiError 404."""
        lanes = self.service.lanes
        named = next((lane for lane in lanes.values() if lane.model == model), None)
        if named is None:
            known = ", ".join(lane.model for lane in lanes.values())
            why = f"the model {model!r:.200} isn't served here; these are: {known}"
            raise ApiError(404, why, param="model", code="model_not_found")
        if draft is None or draft == named.tag:
            return named
        if draft not in lanes or named.tag != next(iter(lanes)):
            why = (
                f"draft: got {draft!r:.200} with the model {model!r:.200}; expected one of "
                f"{', '.join(lanes)} with the model's plain name"
            )
            raise ApiError(404, why, param="draft", code="draft_not_found")
        return lanes[draft]

    def open(self, asked: Asked, lane: Lane, talk: Talk) -> Reply:
        """Makes the request's jobs, ready to be submitted; ApiError 400 where they can't be."""
        context, samples, most = lane.session.context, asked.n or 1, self.service.most
        try:
            params = asked.params(self.limits)
            given = asked.given()
            if len(given) * samples > most:  # before they are all encoded
                raise ValueError(
                    f"n: got {len(given) * samples} answers in one request, expected at most {most}"
                )
            more = asked.chat_template_kwargs if isinstance(asked, ChatAsked) else None
            prompts = [self.encode(prompt, more) for prompt in given]
            for index in range(len(prompts) * samples):
                number, which = next(self._numbers), index // samples
                if len(prompts[which]) >= context:
                    why = (
                        f"prompt {which}: got {len(prompts[which])} tokens, expected fewer than "
                        f"the {context} that prompt and answer may have together on this server; "
                        "shorten it"
                    )
                    raise ApiError(400, why, param="prompt", code="context_length_exceeded")
                one = open_request(
                    prompts[which],
                    which,
                    number if asked.seed is None else index,
                    tokenizer=lane.decoder.tokenizer,
                    params=params,
                    context=context,
                    end_ids=lane.decoder.eos_ids,
                )
                one.completion.index, one.top = number, asked.top
                talk.jobs.append(Job(lane, one, index, talk.hear, bool(asked.stream)))
        except ValueError as error:  # whose message begins with the name of what is wrong
            name = str(error).partition(":")[0].split(" ")[0]
            param = name if name.isidentifier() else None
            raise ApiError(400, str(error), param=param) from error
        read = sum(map(len, prompts))
        if isinstance(asked, ResponseAsked):
            return ResponseReply(asked, read, self.bytes_of)
        return ApiReply(asked, read, self.bytes_of)

    def _bytes_of(self, token: int) -> bytes | None:
        with self._lock:
            return token_bytes(token, self.tokenizer)

    def encode(self, prompt: Prompt, more: dict[str, Any] | None) -> list[int]:
        with self._lock:
            if isinstance(prompt, str):
                return list(self.tokenizer(prompt, verbose=False).input_ids)
            if isinstance(prompt[0], dict):
                return chat_prompt(prompt, self.tokenizer, more=more)
        return prompt
