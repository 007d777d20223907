"""Answers from an OpenAI-compatible server (vLLM, SGLang, llama.cpp, a hosted one).

Three ways to ask, tried in this order unless one is named:
    tokens   /completions with token ids in and, where the server knows `return_token_ids`, out
    chat     /chat/completions, for rows that are chats
    text     /completions with text
A server that answers in text alone has its answer tokenised again. That may give other tokens than
the server wrote; `EndpointAnswer.mismatch` says so where its token counts tell.
"""

import json
import os
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from transformers import PreTrainedTokenizerBase

from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.tokenizer import vocab_size
from draftsmith.train.answers.asks import Ask
from draftsmith.train.answers.top_logprobs import TopLogprobs, asked, read_top_logprobs

APIS = ("auto", "tokens", "chat", "text")
API_KEY_VARIABLE = "DRAFTSMITH_API_KEY"
LONGEST_WAIT_S = 120.0
# What servers say to a request that they don't understand, and to one that they can't serve now.
NOT_UNDERSTOOD = frozenset({400, 404, 405, 415, 422, 501})
TRANSIENT = frozenset({408, 425, 429, *range(500, 600)}) - NOT_UNDERSTOOD


@dataclass(frozen=True)
class EndpointAnswer:
    """One answer. `token_ids` ends in the end token where finish_reason is "stop".

    mismatch: of an answer tokenised again, whether its token count can't be the one that the server
    wrote: exactly at "length"; at "stop" one less passes, since some count the end token. Equal
    counts may hide different tokens, so the rate is a lower bound. None: the server gave ids, or no
    count. prompt_mismatch: the server read another number of prompt tokens than `Ask.ids` has
    (another chat template, a second BOS); None: no count. top_logprobs: a dict a token, where the
    request asks for them.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    retokenised: bool
    mismatch: bool | None
    prompt_mismatch: bool | None
    top_logprobs: TopLogprobs


class Endpoint:
    """A client with bounded concurrency and retries.

    Args:
        url: the server, `http://host:port` or with its `/v1`. A key in the environment variable
            DRAFTSMITH_API_KEY is sent along.
        model: as the server names it; empty: the one that it serves.
        api: one of `APIS`.
        timeout_s: the longest silence of a connection.
        retries: how often a request is sent again after 429, 5xx or a lost connection.
        backoff_s: the wait before the first retry; it doubles each time, with jitter.

    Raises:
        ValueError: an unknown api, or a model that is not named while the server has several.
        GivenUp: the server can't be reached.
    """

    def __init__(
        self,
        url: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model: str = "",
        api: str = "auto",
        concurrency: int = 16,
        timeout_s: float = 600.0,
        retries: int = 6,
        backoff_s: float = 1.0,
    ) -> None:
        if api not in APIS:
            raise ValueError(f"api: got {api!r}, expected one of {', '.join(APIS)}")
        parts = urlsplit(url.rstrip("/"))
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(f"endpoint: got {url!r}, expected http://host:port or https://...")
        if concurrency < 1:
            raise ValueError(f"concurrency: got {concurrency}, expected at least 1")
        self.url = parts.geturl() if parts.path else f"{parts.geturl()}/v1"
        self.tokenizer = tokenizer
        self.api = api
        self.concurrency = concurrency
        self.timeout_s = timeout_s
        self.retries = retries
        self.backoff_s = backoff_s
        self._stop = threading.Event()
        self.model = model or self._served_model()

    def answers(
        self, asks: Iterable[Ask], params: SamplingParams
    ) -> Iterator[tuple[Ask, EndpointAnswer]]:
        """Each request with its reply as it finishes, at most `concurrency` requests under way.

        When a request fails for good, no other is begun, those under way are finished and given
        out, and only then is the error raised.

        Raises:
            ValueError: the server refuses a request.
            GivenUp: the retries are used up.
        """
        waiting = iter(asks)
        under_way: dict[Future[EndpointAnswer], Ask] = {}
        failure: ValueError | None = None
        self._stop.clear()
        with ThreadPoolExecutor(self.concurrency) as pool:
            try:
                while True:
                    # One request alone finds out which api the server has.
                    room = 1 if self.api == "auto" else self.concurrency
                    while failure is None and len(under_way) < room:
                        ask = next(waiting, None)
                        if ask is None:
                            break
                        under_way[pool.submit(self._answer, ask, params)] = ask
                    if not under_way:
                        break
                    done, _ = wait(under_way, return_when=FIRST_COMPLETED)
                    for future in done:
                        ask = under_way.pop(future)
                        try:
                            reply = future.result()
                        except ValueError as error:
                            failure = failure or error
                            self._stop.set()
                        else:
                            yield ask, reply
            finally:
                self._stop.set()
        if failure is not None:
            raise failure

    def _answer(self, ask: Ask, params: SamplingParams) -> EndpointAnswer:
        if self.api != "auto":
            return self._ask_by(self.api, ask, params)
        fallback = "chat" if ask.messages else "text"
        try:
            reply = self._ask_by("tokens", ask, params)
            self.api = "tokens"
        except Refused as refusal:
            if refusal.code not in NOT_UNDERSTOOD or ask.top_logprobs:
                raise
            try:
                reply = self._ask_by(fallback, ask, params)
            except Refused as error:
                message = f"{refusal}; then, by api={fallback}: {error}"
                raise Refused(message, error.code) from error
            self.api = fallback
        return reply

    def _ask_by(self, api: str, ask: Ask, params: SamplingParams) -> EndpointAnswer:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": ask.seed,
        }
        # Not OpenAI's own, but every open server has them.
        body |= {name: value for name in ("top_k", "min_p") if (value := getattr(params, name))}
        if api == "chat":
            if not ask.messages:
                raise ValueError(f"request {ask.index} is plain text, expected a chat for api=chat")
            return self._read(
                self._post("/chat/completions", body | {"messages": list(ask.messages)}, ask), ask
            )
        prompt = (
            {"prompt": ask.ids, "return_token_ids": True, **asked(ask.top_logprobs)}
            if api == "tokens"
            else {"prompt": ask.text}
        )
        return self._read(self._post("/completions", body | prompt, ask), ask)

    def _read(self, answer: dict[str, Any], ask: Ask) -> EndpointAnswer:
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{self.url}: got {answer!r:.200}, expected `choices`") from error
        text = text or ""
        ended = choice.get("finish_reason") == "stop"
        usage = answer.get("usage") or {}
        written, read = usage.get("completion_tokens"), usage.get("prompt_tokens")
        ids, mismatch = choice.get("token_ids"), None
        retokenised = ids is None
        if retokenised:
            ids = list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            if written is not None:
                mismatch = len(ids) not in ((written, written - 1) if ended else (written,))
        top_logprobs: TopLogprobs = []
        if ask.top_logprobs:
            size = vocab_size(self.tokenizer)
            top_logprobs = read_top_logprobs(choice, 0 if retokenised else len(ids), size)
        special = self.tokenizer.all_special_ids
        if ended and not (ids and ids[-1] in special):
            ids = [*ids, self.tokenizer.eos_token_id]
        return EndpointAnswer(
            token_ids=ids,
            text=text,
            finish_reason="stop" if ended else "length",
            retokenised=retokenised,
            mismatch=mismatch,
            prompt_mismatch=None if read is None else read != len(ask.ids),
            top_logprobs=top_logprobs,
        )

    def _served_model(self) -> str:
        names = [entry["id"] for entry in self._send("/models", None, seed=0).get("data", [])]
        if len(names) != 1:
            raise ValueError(
                f"{self.url} serves {names}; say which one to ask with endpoint_model=..."
            )
        return str(names[0])

    def _post(self, path: str, body: dict[str, Any], ask: Ask) -> dict[str, Any]:
        return self._send(path, json.dumps(body).encode(), seed=ask.seed)

    def _send(self, path: str, body: bytes | None, *, seed: int) -> dict[str, Any]:
        """One request with its retries. `seed` is that of the jitter."""
        jitter = random.Random(seed)
        attempts = 0
        while True:
            asked_wait_s = 0.0
            try:
                return self._send_once(path, body)
            except _Busy as busy:
                problem, asked_wait_s = str(busy), busy.wait_s
            except (OSError, HTTPException, json.JSONDecodeError) as error:
                problem = f"{type(error).__name__}: {error}"
            wait_s = max(self.backoff_s * 2**attempts * (0.5 + jitter.random()), asked_wait_s)
            attempts += 1
            if attempts > self.retries or self._stop.wait(min(wait_s, LONGEST_WAIT_S)):
                raise GivenUp(
                    f"{self.url}{path}: given up after {attempts} attempts, the last: {problem}; "
                    "is the server up, and is this its address?"
                )

    def _send_once(self, path: str, body: bytes | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if os.environ.get(API_KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {os.environ[API_KEY_VARIABLE]}"
        request = urllib.request.Request(self.url + path, data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                answer = json.loads(response.read().decode(errors="replace"))
        except urllib.error.HTTPError as error:
            with error:
                said = f"{error.code} {error.read()[:300].decode(errors='replace')}"
            if error.code in TRANSIENT:
                raise _Busy(said, _seconds(error.headers.get("Retry-After"))) from error
            raise Refused(f"{self.url}{path} refuses: {said}", error.code) from error
        if not isinstance(answer, dict):
            raise ValueError(f"{self.url}{path}: got {answer!r:.100}, expected a JSON object")
        return answer


class Refused(ValueError):
    """The server says that a request is wrong; `code` is the HTTP status."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class GivenUp(ValueError):
    """The retries of a request are used up."""


class _Busy(Exception):
    """A status that another attempt may cure, `wait_s` from now at the earliest."""

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s


def _seconds(retry_after: str | None) -> float:
    """Retry-After in seconds; its other form, a date, is left to the backoff."""
    return float(retry_after) if retry_after and retry_after.strip().isdigit() else 0.0
