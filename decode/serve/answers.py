"""From a checked request to its answer, whole or streamed: jobs for the engine thread, and what it
tells of them. Here is where a client that leaves, or a time limit, ends what it asked for.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from draftsmith.decode.engine.request import Completion, open_request
from draftsmith.decode.serve.engine_thread import Job, Lane, Listener, News, Service
from draftsmith.decode.serve.replies import RETRY_S, ApiError, ApiReply, event
from draftsmith.decode.serve.schemas import (
    UNSAID,
    ChatAsked,
    CompletionAsked,
    CompletionBody,
    Encoder,
)

GRACE_S = 5.0  # for the last words of a stream that took too long
LEFT, LATE = News([], "", error="left"), News([], "", error="late")


@dataclass(frozen=True)
class Limits:
    """What one request may ask for. max_tokens: of an answer; timeout_s: from its arrival to its
    end, and for its body; max_body: bytes of it; seed: of requests that have none.
    """

    max_tokens: int = 1024
    timeout_s: float = 300.0
    max_body: int = 1 << 20
    seed: int = 0


Heard = asyncio.Queue[tuple[int, News]]  # which answer of the request, and what


def listener(index: int, heard: Heard, loop: asyncio.AbstractEventLoop) -> Listener:
    """Hands the engine's news of one answer to the loop that the request is answered on."""

    def hear(news: News) -> None:
        with suppress(RuntimeError):  # the loop has ended: nobody is left to tell
            loop.call_soon_threadsafe(heard.put_nowait, (index, news))

    return hear


class Talk:
    """What is heard of one request's answers until they have ended, the client has left, or time is
    up; `close` ends what is still on its way.
    """

    def __init__(self, service: Service, jobs: Sequence[Job], heard: Heard, left_s: float) -> None:
        self.service, self.jobs, self.heard = service, jobs, heard
        loop = asyncio.get_running_loop()
        self.deadline = loop.time() + left_s
        self._alarm = loop.call_at(self.deadline, heard.put_nowait, (-1, LATE))
        self._watch: asyncio.Task[None] | None = None
        self._open = len(jobs)

    def watch(self, request: Request) -> None:
        """Hear of it when the client leaves."""

        async def until_left() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.heard.put_nowait((-1, LEFT))

        self._watch = asyncio.create_task(until_left())

    def unwatch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    async def next(self) -> tuple[int, News]:
        """The next news, and of which answer; ApiError where there is no more to come."""
        index, news = await self.heard.get()
        if news is LATE:
            raise ApiError(504, "the answer took longer than this server allows", code="timeout")
        if news is LEFT:
            raise ApiError(400, "the client has left")  # nobody reads it
        if news.stopped:
            raise ApiError(503, news.error, code="draining", retry_s=RETRY_S)
        if news.error:
            raise ApiError(500, news.error, code="decoding_failed")
        self._open -= news.completion is not None
        return index, news

    def close(self) -> None:
        self._alarm.cancel()
        self.unwatch()
        if self._open:
            self.service.cancel(self.jobs)


class Answers:
    """Asks the engine on behalf of HTTP requests."""

    def __init__(self, service: Service, encoder: Encoder, limits: Limits) -> None:
        self.service, self.encoder, self.limits = service, encoder, limits
        self._given = 0  # running numbers
        self._lock = threading.Lock()

    async def answer(self, asked: CompletionAsked | ChatAsked, request: Request) -> Response:
        """The whole answer, or a stream of it; ApiError for what can't be had."""
        heard: Heard = asyncio.Queue()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        lane = self.lane(asked)
        jobs, reply = await asyncio.to_thread(self.open, asked, lane, heard, loop)
        self.service.submit(jobs)
        talk = Talk(self.service, jobs, heard, self.limits.timeout_s + begun - loop.time())
        talk.watch(request)
        try:
            if asked.stream:
                # Until something has been decoded, an error can still have its status.
                first = await talk.next()
                talk.unwatch()  # the stream looks for itself
                return EventStream(pieces(talk, reply, first), talk)
            answer = await whole(talk, reply)
        except BaseException:
            talk.close()
            raise
        talk.close()
        return JSONResponse(answer)

    def lane_of(self, model: str) -> Lane:
        """The lane of `name` or `name:tag`; ApiError 404 for another."""
        lanes = self.service.lanes.values()
        for lane in lanes:
            if lane.model == model:
                return lane
        known = ", ".join(lane.model for lane in lanes)
        raise ApiError(
            404,
            f"the model {model!r:.200} isn't served here; these are: {known}",
            param="model",
            code="model_not_found",
        )

    def lane(self, asked: CompletionBody) -> Lane:
        """The lane that a request names: by its model, or by the plain model and a draft's tag."""
        named, lanes = self.lane_of(asked.model), self.service.lanes
        if asked.draft is None or asked.draft == named.tag:
            return named
        if asked.draft not in lanes or named.tag != next(iter(lanes)):
            raise ApiError(
                404,
                f"draft: got {asked.draft!r:.200} with the model {asked.model!r:.200}; expected "
                f"one of {', '.join(lanes)} with the model's plain name",
                param="draft",
                code="draft_not_found",
            )
        return lanes[asked.draft]

    def open(
        self,
        asked: CompletionAsked | ChatAsked,
        lane: Lane,
        heard: Heard,
        loop: asyncio.AbstractEventLoop,
    ) -> tuple[list[Job], ApiReply]:
        """The request's answers, ready to be submitted; ApiError 400 where they can't be."""
        chat, most = isinstance(asked, ChatAsked), self.limits.max_tokens
        unsaid = most if chat else min(UNSAID, most)
        try:
            params = asked.params(seed=self.limits.seed, unsaid=unsaid, most=most)
            count = asked.count * asked.samples
            if count > self.service.most:  # before they are all encoded
                raise ValueError(
                    f"n: got {count} answers in one request, expected at most {self.service.most}"
                )
            prompts = asked.prompts(self.encoder)
            numbers = self.numbers(count)
            jobs = []
            for index, number in enumerate(numbers):
                which = index // asked.samples
                check_length(prompts[which], which, lane.session.context)
                one = open_request(
                    prompts[which],
                    which,
                    number if asked.seed is None else index,
                    tokenizer=lane.decoder.tokenizer,
                    params=params,
                    context=lane.session.context,
                    end_ids=lane.decoder.eos_ids,
                )
                one.completion.index = number
                jobs.append(Job(lane, one, listener(index, heard, loop), bool(asked.stream)))
        except ValueError as error:  # whose message begins with the name of what is wrong
            name = str(error).partition(":")[0].split(" ")[0]
            param = name if name.isidentifier() else None
            raise ApiError(400, str(error), param=param) from error
        read = sum(map(len, prompts))
        return jobs, ApiReply(
            asked.model, chat, bool(asked.return_token_ids), asked.with_usage, prompt_tokens=read
        )

    def numbers(self, count: int) -> range:
        """The running numbers of so many answers."""
        with self._lock:
            self._given += count
            return range(self._given - count, self._given)


class EventStream(StreamingResponse):
    """Server-sent events; at its end, however it comes, nothing goes on for nobody."""

    def __init__(self, events: AsyncIterator[str], talk: Talk) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self.talk = talk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # A client that doesn't read holds its stream in the middle of a piece.
            async with asyncio.timeout_at(self.talk.deadline + GRACE_S):
                await super().__call__(scope, receive, send)
        finally:
            self.talk.close()


async def whole(talk: Talk, reply: ApiReply) -> dict[str, object]:
    """All choices, once every one has ended."""
    made: dict[int, Completion] = {}
    while len(made) < len(talk.jobs):
        index, news = await talk.next()
        assert news.completion is not None, "of whole answers the end alone is told"
        made[index] = news.completion
    return reply.whole([made[index] for index in range(len(made))])


async def pieces(talk: Talk, reply: ApiReply, first: tuple[int, News]) -> AsyncIterator[str]:
    """The chunks of a streamed answer. An error ends them as an event of its own."""
    opened: set[int] = set()
    index, news = first
    while True:
        if reply.chat and index not in opened:
            opened.add(index)
            yield reply.first(index)
        made = news.completion
        if news.text or made is not None or reply.with_ids:
            reason = None if made is None else made.finish_reason
            yield reply.piece(index, news.text, news.tokens, reason)
        if made is not None:
            reply.done.append(made)
            if len(reply.done) == len(talk.jobs):
                break
        try:
            index, news = await talk.next()
        except ApiError as error:
            yield event(error.body)
            return
    yield reply.last()


def check_length(prompt: Sequence[int], index: int, context: int) -> None:
    """ApiError for a prompt that leaves no room for an answer."""
    if len(prompt) >= context:
        raise ApiError(
            400,
            f"prompt {index}: got {len(prompt)} tokens, expected fewer than the {context} that "
            "prompt and answer may have together on this server; shorten it",
            param="prompt",
            code="context_length_exceeded",
        )
