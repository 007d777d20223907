"""What clients may ask, in OpenAI's words: schemas, and from them prompts and sampling parameters.

Fields are strict: "5" is no number, and a field that nobody knows is refused, as OpenAI's server
does; a misspelt limit must not pass for none. Options that would change the answer and aren't built
are refused unless they say what happens anyway; those that change nothing are taken and forgotten.
"""

import threading
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from transformers import PreTrainedTokenizerBase

from draftsmith.decode.prompts.chat import chat_prompt
from draftsmith.decode.sampling import SamplingParams

SEEDS = 2**63  # seeds are signed 64-bit integers
UNSAID = 16  # tokens of a completion that doesn't say, as OpenAI's

# Of OpenAI's options, those that aren't built, with the values that ask for nothing. None is one.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "web_search_options": (),
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


Seed = Annotated[int, Field(ge=-SEEDS, lt=SEEDS)]
Whole = Annotated[str, AfterValidator(whole_characters)]
Stop = Annotated[Whole, Field(min_length=1)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Text = Annotated[Whole, Field(min_length=1)]


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
    seed: Seed | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    draft: str | None = None  # the tag of the draft to decode with, in place of model's `name:tag`

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

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer, where the request says."""
        return self.max_tokens

    @property
    def samples(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def params(self, *, seed: int, unsaid: int, most: int) -> SamplingParams:
        """Sampling parameters. seed: of a request without one; unsaid, most: its tokens where it
        doesn't say, and the most that it may ask for. ValueError for values out of range. Filters
        at temperature 0 are dropped: the best token is always kept by them.
        """
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: got it without stream=true; leave it out, or stream")
        limit = unsaid if self.limit is None else self.limit
        if limit > most:
            raise ValueError(f"max_tokens: got {limit}, expected at most {most} on this server")
        temperature = 1.0 if self.temperature is None else self.temperature
        drawn = temperature > 0
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            temperature=temperature,
            top_k=max(0, self.top_k or 0) if drawn else 0,
            top_p=1.0 if self.top_p is None or not drawn else self.top_p,
            min_p=self.min_p or 0.0 if drawn else 0.0,
            max_new_tokens=limit,
            ignore_eos=bool(self.ignore_eos),
            seed=seed if self.seed is None else self.seed,
            stop=stop,
        )


class CompletionAsked(CompletionBody):
    """The body of POST /v1/completions."""

    prompt: (
        Text
        | Tokens
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )

    @property
    def count(self) -> int:
        """How many prompts there are."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return 1 if one else len(self.prompt)

    def prompts(self, encoder: "Encoder") -> list[list[int]]:
        """Each prompt's tokens."""
        if isinstance(self.prompt, str):
            return [encoder.text(self.prompt)]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return [encoder.text(one) if isinstance(one, str) else one for one in self.prompt]


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

    @property
    def plain(self) -> dict[str, str]:
        """As chat templates read it; few of them know the developer."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatAsked(CompletionBody):
    """The body of POST /v1/chat/completions. max_completion_tokens is max_tokens' new name."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def limit(self) -> int | None:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise ValueError(
                f"max_completion_tokens: got {self.max_completion_tokens} and max_tokens="
                f"{self.max_tokens}; expected one of them"
            )
        return both.pop() if both else None

    @property
    def count(self) -> int:
        """How many prompts there are."""
        return 1

    def prompts(self, encoder: "Encoder") -> list[list[int]]:
        """The chat's tokens up to the answer."""
        if self.messages[-1].role == "assistant":
            raise ValueError(
                "messages: got the assistant's as the last one, which leaves nothing to answer; "
                "end with the user's"
            )
        return [encoder.chat([message.plain for message in self.messages])]


class Encoder:
    """Prompts into tokens, by a tokenizer of its own: one that another thread decodes with must not
    be changed meanwhile, as some calls do.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()

    def text(self, text: str) -> list[int]:
        with self._lock:
            return list(self.tokenizer(text, verbose=False).input_ids)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        with self._lock:
            return chat_prompt(messages, self.tokenizer)


def _same(value: Any, off: Any) -> bool:
    """Equal, and neither False for 0 nor True for 1."""
    return value == off and isinstance(value, bool) == isinstance(off, bool)
