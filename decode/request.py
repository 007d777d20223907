"""Requests as the host sees them: a prompt, what it may use, its answer and what was counted."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.sampling import SamplingParams, request_seeds
from draftsmith.models.tokenizer import vocab_size

Prompt = str | Sequence[int]


@dataclass
class Counters:
    """What one request's decoding did. The prefill pass and its token are outside all of it.

    rounds: target calls; emitted: tokens they gave; drafted: proposed tokens; histogram[n]: rounds
    that kept n drafted tokens; reached[i]: rounds that drafted at least i + 1 levels;
    prefill_seconds, decode_seconds: wall time, shared with the other rows of the batch.
    """

    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    histogram: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def record(self, drafted: int, accepted: int, emitted: int) -> None:
        """One round: of `drafted` tokens the rule accepted `accepted`; `emitted` were kept."""
        kept = min(accepted, emitted)
        self.histogram.extend([0] * (drafted + 1 - len(self.histogram)))
        self.reached.extend([0] * (drafted - len(self.reached)))
        self.histogram[kept] += 1
        for level in range(drafted):
            self.reached[level] += 1
        self.rounds += 1
        self.drafted += drafted
        self.emitted += emitted


@dataclass
class Completion:
    """The answer to one prompt. tokens include the stop token, text does not; finish_reason is
    "stop" or "length"; accepted[i] says whether token i came from the draft.
    """

    index: int
    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    counters: Counters = field(default_factory=Counters)


@dataclass(frozen=True)
class Event:
    """One step of one streamed request: tokens and text just added; at the end, the whole."""

    index: int
    tokens: list[int]
    text: str
    completion: Completion | None = None


@dataclass
class Request:
    """A prompt on its way: its completion, its noise seed, and how many tokens it may emit."""

    completion: Completion
    seed: int
    limit: int
    started: float = 0.0
    context_from: int = 0  # text is decoded from here, so that spacing at the seam is right
    shown_to: int = 0  # tokens whose text has been handed out

    @property
    def length(self) -> int:
        """Tokens in the target's KV: all but the pending one."""
        return len(self.completion.prompt_tokens) + max(0, len(self.completion.tokens) - 1)

    def next_text(self, tokenizer: PreTrainedTokenizerBase, finished: bool) -> str:
        """The text added since the last call, in whole characters; at the end, all that is left."""
        tokens = self.completion.tokens
        if finished and self.completion.finish_reason == "stop":
            tokens = tokens[:-1]
        before = str(tokenizer.decode(tokens[self.context_from : self.shown_to]))
        text = str(tokenizer.decode(tokens[self.context_from :]))
        if text.endswith("\ufffd") and not finished:
            return ""
        self.context_from, self.shown_to = self.shown_to, len(tokens)
        return text[len(before) :]


def open_request(
    prompt: Prompt,
    index: int,
    number: int,
    *,
    tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    context: int,
) -> Request:
    """A request for prompt `index` of a call, whose noise is that of prompt `number` of the run.

    Raises ValueError for an empty prompt, ids outside the vocabulary, or no room in the context.
    """
    tokens = list(tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt)
    vocabulary = vocab_size(tokenizer)
    if not tokens:
        raise ValueError(f"prompt {index}: got no tokens, expected at least one")
    if max(tokens) >= vocabulary or min(tokens) < 0:
        raise ValueError(
            f"prompt {index}: got token ids {min(tokens)}..{max(tokens)}, expected ids below "
            f"the tokenizer's {vocabulary}; was it encoded with another tokenizer?"
        )
    room = context - len(tokens)
    if room < 1:
        raise ValueError(
            f"prompt {index}: got {len(tokens)} tokens, expected fewer than the context of "
            f"{context}; shorten the prompt"
        )
    seed = request_seeds(params.seed, number)
    return Request(Completion(index, tokens), seed, min(params.max_new_tokens, room))


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends an answer: the generation config's, else the config's, and the
    tokenizer's.
    """
    named = model.generation_config.eos_token_id if model.generation_config else None
    named = model.config.eos_token_id if named is None else named
    ids = set(named) if isinstance(named, list) else {named}
    return tuple(sorted(i for i in ids | {tokenizer.eos_token_id} if i is not None))
