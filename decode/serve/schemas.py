"""What clients may ask, in OpenAI's words: schemas, and from them prompts and sampling parameters.

Fields are strict: "5" is no number, and a field that nobody knows is refused, as OpenAI's server
does; a misspelt limit must not pass for none. Options that would change the answer and aren't built
are refused unless they say what happens anyway; those that change nothing are taken and forgotten.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from draftsmith.decode.sampling import SamplingParams

SEEDS = 2**63  # seeds are signed 64-bit integers
Prompt = str | list[int] | list[dict[str, str]]  # the last: a chat

# Of OpenAI's options, those that aren't built, with the values that ask for nothing. None is one.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logprobs", "echo"), (False,)),
    **dict.fromkeys(("top_logprobs", "presence_penalty", "frequency_penalty"), (0,)),
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
}
# They say who asks and where it is billed, and have no part in the answer.
FORGOTTEN = {
    *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "verbosity"),
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


class StreamOptions(Strict):
    """include_usage: a last chunk counts the tokens."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class CompletionBody(Strict):
    """What both endpoints take. `top_k`, `min_p`, `ignore_eos`, `return_token_ids` and `draft` are
    not OpenAI's; the first four are vLLM's too.
    """

    model: str
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: Annotated[int, Field(ge=-SEEDS, lt=SEEDS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    draft: str | None = None  # the tag of the draft to decode with, in place of model's `name:tag`
    unsaid: ClassVar[int] = 16  # tokens of an answer to who doesn't say, as OpenAI's

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
        limit, most = self.max_tokens or min(self.unsaid, limits.max_tokens), limits.max_tokens
        if limit > most:
            raise ValueError(f"max_tokens: got {limit}, expected at most {most} on this server")
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
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
        )


class CompletionAsked(CompletionBody):
    """The body of POST /v1/completions."""

    prompt: (
        Text
        | Tokens
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )

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
        """As chat templates read it; few of them know the developer."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatAsked(CompletionBody):
    """The body of POST /v1/chat/completions. max_completion_tokens is max_tokens' new name."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    unsaid: ClassVar[int] = sys.maxsize

    @model_validator(mode="after")
    def with_one_limit(self) -> Self:
        """The limit under its old name."""
        old, new = self.max_tokens, self.max_completion_tokens
        if None not in (old, new) and old != new:
            raise ValueError(
                f"max_completion_tokens: got {new} and max_tokens={old}; expected one of them"
            )
        self.max_tokens = old or new
        return self

    def given(self) -> Sequence[Prompt]:
        """The one prompt: the chat up to the answer."""
        if self.messages[-1].role == "assistant":
            raise ValueError(
                "messages: got the assistant's as the last one, which leaves nothing to answer; "
                "end with the user's"
            )
        return [[message.plain() for message in self.messages]]


def _same(value: Any, off: Any) -> bool:
    """Equal, and neither False for 0 nor True for 1."""
    return value == off and isinstance(value, bool) == isinstance(off, bool)
