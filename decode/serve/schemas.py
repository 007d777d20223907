"""What clients may ask, in OpenAI's words: schemas, and from them prompts and sampling parameters.

Fields are strict: "5" is no number, and a field that nobody knows is refused, as OpenAI's server
does; a misspelt limit must not pass for none. Options that would change the answer and aren't built
are refused unless they say what happens anyway; those that change nothing are taken and forgotten.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from draftsmith.decode.sampling import SamplingParams

SEEDS = 2**63  # seeds are signed 64-bit integers
Prompt = str | list[int] | list[dict[str, str]]  # the last: a chat

# Of OpenAI's options, those that aren't built, with the values that ask for nothing. None is one.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("echo", "logprobs"), (False,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs"), (0,)),
    **dict.fromkeys(("repetition_penalty", "best_of"), (1,)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("audio", "prediction", "web_search_options"), ()),
    "parallel_tool_calls": (True, False),
    "logit_bias": ({},),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "reasoning": ({}, {"effort": "none"}),
    "truncation": ("disabled",),
    "background": (False,),
    **dict.fromkeys(("previous_response_id", "conversation", "prompt"), ()),
}
# They say who asks and where it is billed, and have no part in the answer.
FORGOTTEN = {
    *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prompt_cache_options", "verbosity", "max_tool_calls"),
}
# Of a message that an earlier answer's object was turned into.
EMPTY_OF_MESSAGES = {
    *("name", "refusal", "audio", "annotations", "function_call", "tool_calls", "tool_call_id")
}


def whole_characters(text: str) -> str:
    """Halves of characters, which JSON can spell and UTF-8 can't, are no text."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("text: got half of a character (a lone surrogate); send whole ones")
    return text


Whole = Annotated[str, AfterValidator(whole_characters)]
Stop = Annotated[Whole, Field(min_length=1)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Text = Annotated[Whole, Field(min_length=1)]
Top = Annotated[int, Field(ge=0, le=20)]  # of the likeliest tokens at each place


@dataclass(frozen=True)
class Limits:
    """What one request may ask for. max_tokens: of an answer; timeout_s: from its arrival to its
    end, and for its body; max_body: bytes of it; seed: of requests that have none.
    """

    max_tokens: int = 1024
    timeout_s: float = 300.0
    max_body: int = 1 << 20
    seed: int = 0


class Strict(BaseModel):
    """Nothing is converted, nothing unknown passes, no number is infinite."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StoreAsked(Strict):
    """Whose store: a model's, as completions name it."""

    model: str
    draft: str | None = None


class StreamOptions(Strict):
    """include_usage: a last chunk counts the tokens."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Schema(Strict):
    """A JSON schema, which answers follow whether it says `strict` or not."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    tree: dict[str, Any] | None = Field(None, alias="schema")


Kind = Literal["text", "json_object", "json_schema"]


def followed(kind: Kind, schema: Schema | None) -> str:
    """The text of the JSON schema that answers of a kind follow; empty: of none."""
    tree = None if schema is None else schema.tree
    if (kind == "json_schema") != (tree is not None):
        raise ValueError(
            f"schema: got {'none' if tree is None else 'one'} with type={kind}, expected an object "
            "with type=json_schema, and none with another"
        )
    return "" if kind == "text" else json.dumps(tree or {"type": "object"})


class ResponseFormat(Strict):
    """What an answer is."""

    type: Kind
    json_schema: Schema | None = None


class TextFormat(Schema):
    """The same, as responses spell it."""

    type: Kind


class ResponseText(Strict):
    """Of a response's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Body(Strict):
    """What all endpoints take. `top_k`, `min_p`, `ignore_eos` and `draft` are not OpenAI's; all but
    the last are vLLM's too.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: Annotated[int, Field(ge=-SEEDS, lt=SEEDS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    ignore_eos: bool | None = None
    draft: str | None = None  # the tag of the draft to decode with, in place of model's `name:tag`
    unsaid: ClassVar[int] = sys.maxsize  # tokens of an answer to who doesn't say
    limit: ClassVar[str] = "max_tokens"  # the field that does

    @property
    def schema_text(self) -> str:
        """Of the JSON schema that the answer follows; empty: none."""
        return ""

    @model_validator(mode="before")
    @classmethod
    def without_what_says_nothing(cls, given: Any) -> Any:
        """The options that are left once those that ask for nothing are gone."""
        if not isinstance(given, dict):
            return given
        kept = {}
        for name, value in given.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name in NOT_BUILT:
                if value is not None and not any(_same(value, off) for off in NOT_BUILT[name]):
                    raise ValueError(
                        f"{name}: got {value!r:.80}, which this server doesn't offer; leave it out"
                    )
            elif name not in FORGOTTEN:
                raise ValueError(f"{name!r:.80}: unknown option; correct its name or leave it out")
        return kept

    def params(self, limits: Limits) -> SamplingParams:
        """Sampling parameters. Filters at temperature 0 are dropped: the best token is always kept
        by them. ValueError for values out of range.
        """
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: got it without stream=true; leave it out, or stream")
        most = limits.max_tokens
        limit = getattr(self, self.limit) or min(self.unsaid, most)
        if limit > most:
            raise ValueError(f"{self.limit}: got {limit}, expected at most {most} on this server")
        temperature = 1.0 if self.temperature is None else self.temperature
        drawn = temperature > 0
        return SamplingParams(
            temperature=temperature,
            top_k=max(0, self.top_k or 0) if drawn else 0,
            top_p=self.top_p or 1.0 if drawn else 1.0,
            min_p=self.min_p or 0.0 if drawn else 0.0,
            max_new_tokens=limit,
            ignore_eos=bool(self.ignore_eos),
            seed=limits.seed if self.seed is None else self.seed,
            json_schema=self.schema_text,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
        )


class CompletionBody(Body):
    """What completions and chats take. `return_token_ids` and `return_tokens_as_token_ids` are
    vLLM's.
    """

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # of log-probabilities: "token_id:5"
    response_format: ResponseFormat | None = None

    @property
    def schema_text(self) -> str:
        asked = self.response_format
        return followed(asked.type, asked.json_schema) if asked else ""


class CompletionAsked(CompletionBody):
    """The body of POST /v1/completions."""

    unsaid: ClassVar[int] = 16  # as OpenAI's
    prompt: (
        Text
        | Tokens
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )
    logprobs: Top | Literal[False] | None = None

    @property
    def top(self) -> int | None:
        """How many of the likeliest tokens to list; None for no log-probabilities."""
        return None if self.logprobs is False else self.logprobs

    def given(self) -> Sequence[Prompt]:
        """The prompts, as they came."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt  # type: ignore[list-item,return-value]


class Part(Strict):
    """A piece of a message; text alone is read."""

    type: Literal["text"]
    text: Whole


class Message(Strict):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Whole | list[Part]

    @model_validator(mode="before")
    @classmethod
    def without_what_is_empty(cls, given: Any) -> Any:
        """An answer's own message may be sent back as it came."""
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if not (name in EMPTY_OF_MESSAGES and (name == "name" or value in (None, [], "")))
        }

    def plain(self) -> dict[str, str]:
        """As chat templates read it."""
        return turn(self.role, self.content)


class ChatAsked(CompletionBody):
    """The body of POST /v1/chat/completions. max_completion_tokens is max_tokens' new name."""

    messages: Annotated[list[Message], Field(min_length=1)]
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's, such as {"enable_thinking": false}
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None

    @property
    def top(self) -> int | None:
        """As of completions."""
        return self.top_logprobs or 0 if self.logprobs else None

    @model_validator(mode="after")
    def with_one_limit(self) -> Self:
        """The limit under its old name."""
        old, new = self.max_tokens, self.max_completion_tokens
        if None not in (old, new) and old != new:
            raise ValueError(
                f"max_completion_tokens: got {new} and max_tokens={old}; expected one of them"
            )
        self.max_tokens = old or new
        if self.top_logprobs and not self.logprobs:
            got = f"got {self.top_logprobs} without logprobs=true"
            raise ValueError(f"top_logprobs: {got}; leave it out, or ask for logprobs")
        return self

    def given(self) -> Sequence[Prompt]:
        """The one prompt: the chat up to the answer."""
        return [to_answer([message.plain() for message in self.messages], "messages")]


class InputPart(Strict):
    """A piece of an item; of an earlier answer's, the text alone is read."""

    type: Literal["input_text", "output_text"]
    text: Whole
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputItem(Strict):
    """One turn, as it was sent or answered."""

    type: Literal["message"] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Whole | list[InputPart]


class ResponseAsked(Body):
    """The body of POST /v1/responses: text in, text out, nothing stored."""

    input: Text | Annotated[list[InputItem], Field(min_length=1)]
    instructions: Whole | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Top | None = None
    text: ResponseText | None = None
    n: ClassVar[int] = 1
    limit: ClassVar[str] = "max_output_tokens"

    @property
    def top(self) -> int | None:
        """As of completions."""
        return self.top_logprobs or 0 if self.include else None

    @property
    def schema_text(self) -> str:
        asked = self.text and self.text.format
        return followed(asked.type, asked) if asked else ""

    def given(self) -> Sequence[Prompt]:
        """The one prompt: instructions, then the input."""
        told = [turn("system", self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [[*told, turn("user", self.input)]]
        items = [turn(item.role, item.content) for item in self.input]
        return [to_answer([*told, *items], "input")]


def turn(role: str, content: str | Sequence[Part | InputPart]) -> dict[str, str]:
    """As chat templates read it; few of them know the developer."""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return {"role": "system" if role == "developer" else role, "content": text}


def to_answer(turns: list[dict[str, str]], field: str) -> list[dict[str, str]]:
    """A chat that leaves something to answer; else ValueError."""
    if turns[-1]["role"] == "assistant":
        raise ValueError(
            f"{field}: got the assistant's as the last one, which leaves nothing to answer; "
            "end with the user's"
        )
    return turns


def _same(value: Any, off: Any) -> bool:
    """Equal, and neither False for 0 nor True for 1."""
    return value == off and isinstance(value, bool) == isinstance(off, bool)
