"""The server's HTTP side: OpenAI's endpoints, and errors in OpenAI's shape whoever finds them."""

import asyncio
import hmac
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from draftsmith import __version__
from draftsmith.decode.serve.answers import Answers
from draftsmith.decode.serve.engine_thread import Lane, Service
from draftsmith.decode.serve.journal import standing
from draftsmith.decode.serve.replies import STATUSES, ApiError
from draftsmith.decode.serve.schemas import (
    ChatAsked,
    CompletionAsked,
    Limits,
    ResponseAsked,
    StoreAsked,
)
from draftsmith.decode.serve.stores import Store

# What values a field may have, where the schema's own message would list every way to be wrong.
EXPECTED = {
    "prompt": "expected text, token ids, or a list of either, none of them empty",
    "stop": "expected a string or up to four of them, none of them empty",
    "messages": "expected a list of {role, content} with roles system, developer, user and "
    "assistant, and text as content",
    "input": "expected text, or a list of {role, content} with roles system, developer, user and "
    "assistant, and text as content",
}


OPEN = ("/health", "/")  # to those without the key, too
PAGE = Path(__file__).with_name("live.html")
ALONE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
ALONE += "connect-src 'self'"  # the page loads nothing from elsewhere


class Problem(BaseModel):
    """What is wrong. param: the field; code: for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Every error's body."""

    error: Problem


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": about} for status, (_, about) in STATUSES.items()
}
ANSWERS = ERRORS | {
    200: {"description": "the answer, or a stream of it", "content": {"text/event-stream": {}}}
}


class Gate:
    """Before everything else: the key, and the body, read whole within its limits. With the body in
    hand, what the endpoints receive next is the client's leaving.
    """

    def __init__(self, app: ASGIApp, key: str, limits: Limits) -> None:
        self.app, self.key, self.limits = app, key.encode(), limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            self.check_key(request)
            body = await self.read(request)
        except ClientDisconnect:
            return
        except ApiError as error:
            await refusal(error)(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)

    def check_key(self, request: Request) -> None:
        if not self.key or request.scope["path"] in OPEN:
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        scheme, _, key = given.partition(b" ")
        # Both are compared in the same time wherever they differ.
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self.key):
            why = "no key or a wrong one; expected Authorization: Bearer KEY"
            raise ApiError(401, why, code="invalid_api_key")

    async def read(self, request: Request) -> bytes:
        most, body = self.limits.max_body, bytearray()
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        raise ApiError(413, f"got a body over {most} bytes; shorten it")
        except TimeoutError as error:
            raise ApiError(408, "the request's body didn't arrive in time") from error
        return bytes(body)


def make_app(
    service: Service,
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
    key: str,
    stores: Mapping[str, Store],
) -> FastAPI:
    """The application for a service that has its lanes. key: that clients must show, empty for
    none; stores: by the tags of the lanes that have one.
    """
    app = FastAPI(title="Draftsmith", version=__version__, docs_url=None, redoc_url=None)
    answers = Answers(service, tokenizer, limits)
    created = int(time.time())

    @app.post("/v1/completions", responses=ANSWERS)
    async def completions(asked: CompletionAsked, request: Request) -> Response:
        """Text that follows a prompt."""
        return await answers.answer(asked, request)

    @app.post("/v1/chat/completions", responses=ANSWERS)
    async def chat(asked: ChatAsked, request: Request) -> Response:
        """The assistant's next turn, through the tokenizer's chat template."""
        return await answers.answer(asked, request)

    @app.post("/v1/responses", responses=ANSWERS)
    async def responses(asked: ResponseAsked, request: Request) -> Response:
        """The same as a chat, in the shape of OpenAI's newer API."""
        return await answers.answer(asked, request)

    @app.get("/v1/models", responses={401: ERRORS[401]})
    async def models() -> Response:
        """The target's name, and `name:tag` for each draft of its own."""
        data = [about(lane, created) for lane in service.lanes.values()]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{model:path}", responses={401: ERRORS[401], 404: ERRORS[404]})
    async def model(model: str) -> Response:
        """One of them."""
        return JSONResponse(about(answers.lane(model), created))

    @app.get("/health", responses={503: {"description": "draining, or the engine has stopped"}})
    async def health() -> Response:
        """Whether requests are taken."""
        return JSONResponse({"status": service.state}, 200 if service.state == "ok" else 503)

    @app.get("/metrics", responses={401: ERRORS[401]})
    async def metrics() -> Response:
        """Counters, for Prometheus."""
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4")

    @app.get("/live", responses={401: ERRORS[401]})
    async def live() -> Response:
        """What each draft has done until now, for the page at `/`."""
        lanes = [standing(service, lane) for lane in service.lanes.values()]
        return JSONResponse({"state": service.state, "lanes": lanes})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """Acceptance as it happens; of itself it holds no data."""
        return HTMLResponse(PAGE.read_text("utf-8"), headers={"Content-Security-Policy": ALONE})

    keep_stores(app, answers, stores)
    shape_errors(app)
    app.add_middleware(Gate, key=key, limits=limits)
    return app


def keep_stores(app: FastAPI, answers: Answers, stores: Mapping[str, Store]) -> None:
    """What may be asked of a store. These wait for the disk, on threads of their own."""

    def kept(asked: StoreAsked, *, forget: bool) -> Response:
        lane = answers.lane(asked.model, asked.draft)
        store = stores.get(lane.tag)
        if store is None or not (forget or store.path):
            why = f"the draft of {lane.model} has no store{'' if store is None else ' with a file'}"
            why += "; expected one of a drafter suffix, recycling or stand"
            raise ApiError(400, why + ("" if forget else ", as suffix:FILE"), param="model")
        store.keep(forget=forget)
        lanes = answers.service.lanes
        models = [lanes[tag].model for tag, one in stores.items() if one is store]
        file = None if store.path is None else str(store.path)
        return JSONResponse({"object": "store", "models": models, "file": file})

    @app.post("/forget", responses=ERRORS)
    def forget(asked: StoreAsked) -> Response:
        """Empty a store, its file too; answers on their way are remembered from here on."""
        return kept(asked, forget=True)

    @app.post("/save", responses=ERRORS)
    def save(asked: StoreAsked) -> Response:
        """Write a store to its file; what is answered is on the disk."""
        return kept(asked, forget=False)


def about(lane: Lane, created: int) -> dict[str, Any]:
    """A model as OpenAI lists it, and which draft decodes for it."""
    return {
        "id": lane.model,
        "object": "model",
        "created": created,
        "owned_by": "draftsmith",
        "max_model_len": lane.session.context,
        "draft": lane.draft,
    }


def refusal(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


def shape_errors(app: FastAPI) -> None:
    """All errors in OpenAI's shape, in answers and on the page that describes them."""

    async def answer(_: Request, error: Exception) -> Response:
        match error:
            case ApiError():
                return refusal(error)
            case RequestValidationError():
                return refusal(first_fault(error))
            case HTTPException():
                shaped = refusal(ApiError(error.status_code, str(error.detail)))
                shaped.headers.update(error.headers or {})
                return shaped
        return refusal(ApiError(500, "an error of the server's own; see its log"))

    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)

    def page() -> dict[str, Any]:
        """FastAPI's page without its 422s, which are 400s here."""
        made = FastAPI.openapi(app)
        for path in made["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return made

    app.openapi = page  # type: ignore[method-assign]


def first_fault(error: RequestValidationError) -> ApiError:
    """400 for the first of what the schema finds."""
    faults = error.errors()
    fault = next((fault for fault in faults if fault["type"] == "value_error"), faults[0])
    place = [str(part) for part in fault["loc"][1:]]
    name = where = place[0] if place else ""
    if fault["type"] == "json_invalid":
        return ApiError(400, f"the body isn't JSON: {fault['ctx']['error']}", code="invalid_json")
    if fault["type"] == "value_error":  # our own words
        message = str(fault["ctx"]["error"])
        return ApiError(400, message, param=name or message.partition(":")[0].strip("'\""))
    if not place:
        return ApiError(400, "expected a JSON object, sent as application/json")
    words = EXPECTED.get(name)
    if words is None:
        said, where = fault["msg"], ".".join(place)
        words = said[:1].lower() + said[1:]
        words = words.replace("input should be", "expected", 1)
    return ApiError(400, f"{where}: got {fault['input']!r:.60}, {words}", param=name)
