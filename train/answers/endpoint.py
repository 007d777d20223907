"""Answers from an OpenAI-compatible server (vLLM, SGLang, llama.cpp, a hosted one).

Three ways to ask, tried in this order unless one is named:
    tokens   /completions with token ids in and, where the server knows `return_token_ids`, out
    chat     /chat/completions, for rows that are chats
    text     /completions with text
A server that answers in text alone has its answer tokenised again. That may give other tokens than
the server wrote; `mismatch` of an answer says so where its token counts tell.
"""

import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

from transformers import PreTrainedTokenizerBase

from draftsmith.command import check_least, check_one_of
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.prompts.chat import SERVED, template_settings
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.tokenizer import special_ids, vocab_size
from draftsmith.train.answers.asks import Ask
from draftsmith.train.answers.reverse import ReversePair
from draftsmith.train.answers.top_logprobs import read_top_logprobs
from draftsmith.train.text.prepared import Answer

APIS = ("auto", "tokens", "chat", "text")
# What servers say to a request that they don't understand, and what the client tries again.
NOT_UNDERSTOOD = frozenset({400, 404, 405, 415, 422, 501})
TRANSIENT = frozenset({408, 409, 429, *range(500, 600)}) - NOT_UNDERSTOOD


@dataclass(kw_only=True)
class EndpointSpec:
    """The group `endpoint`."""

    url: str = ""  # http://host:port, or with its /v1; empty: the target answers here
    model: str = ""  # as the server names it; empty: the only one it serves
    api: str = "auto"  # auto | tokens | chat | text
    top_logprobs: int = 0  # of each token, kept to train on; see train/teachers/likeliest.py
    concurrency: int = 16  # requests under way
    # Of a request, after 429, 5xx or a lost connection. Waits double from half a second to eight;
    # ten take a minute. Where the server says how long, that.
    retries: int = 10
    timeout_s: float = 600.0  # the longest silence of a connection


class Endpoint:
    """Requests by the openai client (its retries, waits and connections), some at a time; a key in
    DRAFTSMITH_API_KEY is sent along. api: once one was found out, that.

    ValueError: an unknown api, a model that is not named while the server has several, no openai
    client; `GivenUp`: the server can't be reached.
    """

    def __init__(self, spec: EndpointSpec, tokenizer: PreTrainedTokenizerBase) -> None:
        check_one_of("api", spec.api, APIS)
        check_least(spec, concurrency=1)
        url = urlsplit(spec.url.rstrip("/"))
        if url.scheme not in ("http", "https") or not url.hostname or url.query:
            raise ValueError(
                f"endpoint: got {spec.url!r}, expected http://host:port or https://..."
            )
        self.tokenizer, self.concurrency = tokenizer, spec.concurrency
        self.model, self.api = spec.model, spec.api
        self.url = url.geturl() if url.path else f"{url.geturl()}/v1"
        try:
            import openai
        except ModuleNotFoundError as error:
            raise ValueError(
                f"endpoint: got no package {error.name}, expected the extra `endpoint`: "
                "pip install 'draftsmith[endpoint]'"
            ) from error
        self._openai: Any = openai
        key = os.environ.get("DRAFTSMITH_API_KEY")
        # OPENAI_API_KEY, OPENAI_ORG_ID and OPENAI_PROJECT_ID are none of this server's business.
        none = self._openai.Omit()
        self._headers = {"Authorization": f"Bearer {key}" if key else none}
        self._headers |= {"OpenAI-Organization": none, "OpenAI-Project": none}
        self._client = self._openai.OpenAI(
            base_url=self.url, api_key="-", timeout=spec.timeout_s, max_retries=spec.retries
        )
        if not self.model:
            names = [entry["id"] for entry in self._send("/models").get("data", [])]
            if len(names) != 1:
                raise ValueError(
                    f"{self.url} serves {names}; say which one to ask with endpoint.model=..."
                )
            self.model = str(names[0])

    def answers(self, asks: Iterable[Ask], params: SamplingParams) -> Iterator[Answer]:
        """The answer to each request as it finishes, at most `concurrency` requests under way.

        When a request fails for good, no other is begun, those under way are finished and given
        out, and only then is the error raised: `Refused` by the server, or `GivenUp`.
        """
        waiting = iter(asks)
        under_way: set[Future[Answer]] = set()
        failure: ValueError | None = None
        with ThreadPoolExecutor(self.concurrency) as pool:
            while True:
                # One request alone finds out which api the server has.
                room = 1 if self.api == "auto" else self.concurrency
                for ask in islice(waiting, 0 if failure else max(0, room - len(under_way))):
                    under_way.add(pool.submit(self._answer, ask, params))
                if not under_way:
                    break
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for future in done:
                    try:
                        answer = future.result()
                    except ValueError as error:
                        failure = failure or error
                    else:
                        yield answer
        if failure is not None:
            raise failure

    def _answer(self, ask: Ask, params: SamplingParams) -> Answer:
        if self.api != "auto":
            return self._ask_by(self.api, ask, params)
        api = "tokens"
        try:
            reply = self._ask_by(api, ask, params)
        except Refused as refusal:
            if refusal.code not in NOT_UNDERSTOOD or ask.top_logprobs:
                raise
            api = "chat" if ask.messages else "text"
            try:
                reply = self._ask_by(api, ask, params)
            except Refused as error:
                message = f"{refusal}; then, by api={api}: {error}"
                raise Refused(message, error.code) from error
        self.api = api
        return reply

    def _ask_by(self, api: str, ask: Ask, params: SamplingParams) -> Answer:
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
            body |= {"messages": list(ask.messages)} | (
                {"tools": list(ask.tools)} if ask.tools else {}
            )
            if more := template_settings(self.tokenizer):  # the server's template is as ours
                body |= {SERVED: more}
            answer = self._send("/chat/completions", body)
            return self._read(answer, ask)
        prompt: dict[str, Any] = {"prompt": ask.text}
        if api == "tokens":
            prompt = {"prompt": ask.ids, "return_token_ids": True}
            if ask.top_logprobs:
                prompt |= {"logprobs": ask.top_logprobs, "return_tokens_as_token_ids": True}
        return self._read(self._send("/completions", body | prompt), ask)

    def _read(self, answer: dict[str, Any], ask: Ask) -> Answer:
        """What `made` tells, and of an answer tokenised again `mismatch`, whether its token count
        can't be the one that the server wrote: exactly at "length"; at "stop" one less passes,
        since some count the end token. Equal counts may hide different tokens, so the rate is a
        lower bound. None: the server gave ids, or no count. prompt_mismatch: the server read
        another number of prompt tokens than `Ask.ids` has (another chat template, a second BOS);
        None: no count. top_logprobs: a dict a token, where the request asks for them.
        """
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{self.url}: got {answer!r:.200}, expected `choices`") from error
        said = choice.get("message") or {}
        if thought := said.get("reasoning_content") or said.get("reasoning"):
            raise ValueError(
                f"{self.url}: got an answer without its thinking, which came apart from it "
                f"({thought!r:.40}), so its tokens can't be known; ask by endpoint.api=tokens, or "
                "start the server without a reasoning parser"
            )
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
        told: Answer = {"retokenised": retokenised, "mismatch": mismatch}
        told["prompt_mismatch"] = None if read is None else read != len(ask.ids)
        listed = []
        if ask.top_logprobs:
            size, tokens = vocab_size(self.tokenizer), 0 if retokenised else len(ids)
            listed = read_top_logprobs(choice, tokens, size)
        if ended and not (ids and ids[-1] in special_ids(self.tokenizer)):
            end = self.tokenizer.eos_token_id
            if ask.top_logprobs and len(listed) == len(ids):
                listed.append({end: 0.0})  # nobody told its law: as greedy as the end was
            ids = [*ids, end]
        if listed:
            told["top_logprobs"] = listed
        return made(ask, ids, text, "stop" if ended else "length") | told

    def _send(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """What a server says to a request, or to a GET. By the client's way around its models of
        answers: a server's own fields pass, and so does one that names no type of content.
        """
        ask = self._client.post if body else self._client.get
        given = {"body": body} if body else {}
        try:
            said = ask(path, cast_to=str, options={"headers": self._headers}, **given)
        except self._openai.APIError as error:
            code = getattr(error, "status_code", None)  # None: no connection, or a lost one
            problem = f"{code} {error.response.text[:300]}" if code else repr(error.__cause__)
            if code and code not in TRANSIENT:
                raise Refused(f"{self.url}{path} refuses: {problem}", code) from error
            attempts = int(error.request.headers["x-stainless-retry-count"]) + 1
            raise GivenUp(
                f"{self.url}{path}: given up after {attempts} attempts, the last: {problem}; "
                "is the server up, and is this its address?"
            ) from error
        try:
            answer = json.loads(said)
        except json.JSONDecodeError:
            answer = said
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


def made(ask: Ask, tokens: list[int], text: str, finish_reason: str) -> Answer:
    """An answer as a folder keeps it; tokens: the end token last where the reason is "stop"."""
    answer = {"index": ask.index, "seed": ask.seed, "prompt_ids": ask.ids}
    return answer | {"token_ids": tokens, "text": text, "finish_reason": finish_reason}


Writer = Decoder | ReversePair | Endpoint


def write_answers(writer: Writer, asks: list[Ask], params: SamplingParams) -> Iterator[Answer]:
    """Answers as they finish; a row that is free, here or there, takes the next prompt at once."""
    if isinstance(writer, Endpoint):
        yield from writer.answers(asks, params)
        return
    for event in writer.stream([ask.ids for ask in asks], params, [ask.index for ask in asks]):
        if done := event.completion:
            yield made(asks[event.index], done.tokens, done.text, done.finish_reason)
