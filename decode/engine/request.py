"""Requests as the host sees them: a prompt, what it may use, its answer and what was counted."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.engine.grammar import Grammar
from draftsmith.decode.sampling import SamplingParams, request_seeds
from draftsmith.models.tokenizer import vocab_size

Prompt = str | Sequence[int]
SPREAD, HEARD = 0.3, 8  # of rows' kept tokens, until so many rounds of each are known
UNFINISHED = "\ufffd"  # what bytes decode to that don't make a character, or not yet


@dataclass
class AnswerText:
    """The text of a growing answer, and the stop strings in it, however many tokens arrive at once:
    an answer ends at the first token after which the text holds one. Characters may span tokens, so
    text is read through a window: the tokens read last, which fix the spacing at the seam, and
    those not yet read.

    text: of the tokens read; taken: tokens that have arrived; shown: characters handed out.
    """

    tokenizer: PreTrainedTokenizerBase
    stop: tuple[str, ...] = ()
    text: str = ""
    taken: int = 0
    shown: int = 0
    _window: list[int] = field(default_factory=list)  # its first _context tokens are read
    _context: int = 0

    @property
    def broken(self) -> bool:
        """Whether a stop string holds what bytes that are no character decode to, which may change
        with each token: all the text is then read anew, and handed out at the end.
        """
        return any(UNFINISHED in stop for stop in self.stop)

    def add(self, tokens: Sequence[int]) -> int | None:
        """Take in an answer's next tokens. Returns None, or how many of them to keep: up to the one
        that completes a stop string; nothing may be added then.
        """
        if not tokens:
            return None
        start = max(0, len(self.text) + 1 - max(map(len, self.stop), default=1))
        new = self._decode([*self._window, *tokens])
        # Bytes that aren't a character yet may hide a stop string that one token fewer shows.
        whole = not self.stop or (UNFINISHED not in new and not self.broken)
        if whole and not self._stopped(self.text[start:] + new):
            self._take(tokens, new)
            return None
        for count, token in enumerate(tokens, 1):
            new = self._decode([*self._window, token])
            if self._stopped(self.text[start:] + new):
                return count
            self._take([token], new)
        return None

    def next_piece(self) -> str:
        """The text to hand out now: all but an ending that may turn out to begin a stop string."""
        end = len(self.text) - held_back(self.text, self.stop)
        piece = self.text[self.shown : end]
        self.shown = end
        return piece

    def _stopped(self, text: str) -> bool:
        return any(stop in text for stop in self.stop)

    def _decode(self, window: list[int]) -> str:
        """The text of a window after its context."""
        before = self.tokenizer.decode(self._window[: self._context])
        return str(self.tokenizer.decode(window))[len(before) :]

    def _take(self, tokens: Sequence[int], new: str) -> None:
        self._window += tokens
        self.taken += len(tokens)
        if not (self.broken or new.endswith(UNFINISHED)):
            self.text += new
            self._window = self._window[self._context :]
            self._context = len(self._window)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text up to the first stop string in it; all of it without one."""
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=len(text))]


def held_back(text: str, stop: Sequence[str]) -> int:
    """Length of the longest ending of the text that begins a stop string."""
    lengths = range(min(len(text), max(map(len, stop), default=1) - 1), 0, -1)
    return next((n for n in lengths if any(s.startswith(text[-n:]) for s in stop)), 0)


@dataclass
class Counters:
    """What one request's decoding did. The prefill pass and its token are outside all of it.

    rounds: target calls; emitted: tokens they gave; drafted: levels; nodes: tokens proposed;
    histogram[n]: rounds that kept n drafted tokens; reached[i]: rounds that drafted at least i + 1
    levels; tried[i]: of these, rounds that kept the i levels before; prefill_seconds,
    decode_seconds: wall time, shared with the other rows of the batch.
    """

    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    nodes: int = 0
    histogram: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def record(self, drafted: int, accepted: int, emitted: int, nodes: int | None = None) -> None:
        """One round of `drafted` levels and `nodes` tokens (by default a chain's): `accepted` by
        the rule, `emitted` kept. Without a draft as many rounds as tokens.
        """
        rounds = 1 if drafted else max(1, emitted)
        kept = min(accepted, emitted)
        for counts in (self.histogram, self.reached, self.tried):
            length = drafted + (counts is self.histogram)
            counts.extend([0] * (length - len(counts)))
        self.histogram[kept] += rounds
        for level in range(drafted):
            self.reached[level] += 1
            self.tried[level] += level <= kept
        self.rounds += rounds
        self.drafted += drafted
        self.nodes += drafted if nodes is None else nodes
        self.emitted += emitted


def lag_of(counts: Sequence[Counters]) -> float:
    """By which share of the mean the slowest of some rows keeps less, were they spread normally."""
    kept = [c.emitted / c.rounds - 1 for c in counts if c.rounds >= HEARD]
    spread, mean = SPREAD, sum(kept) / max(1, len(kept))
    if len(kept) > 1 and mean:
        spread = math.dist(kept, [mean] * len(kept)) / math.sqrt(len(kept)) / mean
    return min(1.0, spread * NormalDist().inv_cdf(max(0.5, 1 - 1 / (len(counts) + 1))))


class Listed(NamedTuple):
    """One token's log-probability under the target at temperature 1, and the likeliest tokens there
    with theirs.
    """

    log_p: float
    likeliest: list[tuple[int, float]]


@dataclass
class Completion:
    """The answer to one prompt. tokens include the stop token, or end in the one that completes a
    stop string; text has neither. finish_reason: "stop", "length", "abort" (cancelled), or "error".
    accepted[i]: whether token i came from the draft; corrected[i]: whether it had proposed others
    there alone; listed: of each token, where the request asks for it.
    """

    index: int
    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    corrected: list[bool] = field(default_factory=list)
    listed: list[Listed] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    error: str = ""
    counters: Counters = field(default_factory=Counters)


@dataclass(frozen=True)
class Event:
    """One step of one streamed request: tokens and text just added (listed: as of `Completion`); at
    the end, the whole.
    """

    index: int
    tokens: list[int]
    text: str
    completion: Completion | None = None
    listed: Sequence[Listed] = ()


@dataclass(eq=False)
class Request:
    """A prompt on its way. limit: tokens that it may emit; answer: as far as it has been read; top:
    how many of the likeliest tokens to list beside each of the answer's, None to list nothing.
    """

    completion: Completion
    params: SamplingParams
    seed: int
    limit: int
    stop_ids: frozenset[int]
    answer: AnswerText
    started: float = 0.0
    stopped: bool = False  # by a stop string
    top: int | None = None
    grammar: Grammar | None = None  # what the answer has to follow

    @property
    def length(self) -> int:
        """Tokens in the target's KV: all but the pending one."""
        return len(self.completion.prompt_tokens) + max(0, len(self.completion.tokens) - 1)

    def cut(self, tokens: list[int]) -> tuple[list[int], bool]:
        """What to keep of the answer's next tokens, and whether a stop string ends it there."""
        kept = self.answer.add(tokens) if self.answer.stop else None
        self.stopped = kept is not None
        return tokens[:kept], self.stopped

    def take_listed(self, told_TW: Tensor) -> None:
        """Take in `told_log_probs` of the answer's newest tokens, if it was asked for."""
        if self.top is None:
            return
        for own, *likeliest in told_TW.tolist():
            ids, values = likeliest[: len(likeliest) // 2], likeliest[len(likeliest) // 2 :]
            top = list(zip(map(int, ids), values, strict=True))[: self.top]
            self.completion.listed.append(Listed(own, top))

    def finish(self, error: str = "", *, aborted: bool = False) -> None:
        """The end, all tokens given: sets the completion's reason, error and text."""
        made = self.completion
        ended = bool(made.tokens) and not error and made.tokens[-1] in self.stop_ids
        reason = "stop" if ended or self.stopped else "length"
        made.error, made.finish_reason = error, "error" if error else reason
        if aborted:
            made.finish_reason = "abort"
        text = self.answer.tokenizer.decode(made.tokens[:-1] if ended else made.tokens)
        made.text = before_stop(str(text), self.answer.stop)

    def next_text(self, finished: bool) -> str:
        """The text added since the last call, in whole characters and short of what may become a
        stop string; at the end, all that is left of the completion's text.
        """
        if finished:
            return self.completion.text[self.answer.shown :]
        self.answer.add(self.completion.tokens[self.answer.taken :])
        return self.answer.next_piece()


def open_request(
    prompt: Prompt,
    index: int,
    number: int,
    *,
    tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    context: int,
    end_ids: Collection[int] = (),
) -> Request:
    """A request for prompt `index` of a call, whose noise is that of prompt `number` of the run.
    end_ids: what ends an answer unless `params` ignores it.

    Raises ValueError for an empty prompt, ids outside the vocabulary, no room in the context, a
    prompt that ends in one of `end_ids`, after which there is nothing to answer, or a schema that
    can't be followed.
    """
    tokens = list(tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt)
    vocabulary = vocab_size(tokenizer)
    if not tokens:
        raise ValueError(
            f"prompt {index}: got no tokens, expected at least one; give it text, or leave it out"
        )
    if max(tokens) >= vocabulary or min(tokens) < 0:
        raise ValueError(
            f"prompt {index}: got token ids {min(tokens)}..{max(tokens)}, expected ids below "
            f"the tokenizer's {vocabulary}; was it encoded with another tokenizer?"
        )
    if tokens[-1] in end_ids and not params.ignore_eos:
        raise ValueError(
            f"prompt {index}: got {tokenizer.decode(tokens[-1:])!r} as its last token, which ends "
            "an answer, expected a prompt that goes on; take the token off, or set ignore_eos"
        )
    stops = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *end_ids)
    schema, room = params.json_schema, context - len(tokens)
    if room < 1:
        raise ValueError(
            f"prompt {index}: got {len(tokens)} tokens, expected fewer than the context of "
            f"{context} (of target and drafter the smaller one); shorten the prompt"
        )
    return Request(
        Completion(index, tokens),
        params,
        seed=request_seeds(params.seed, number),
        limit=min(params.max_new_tokens, room),
        stop_ids=frozenset(stops),
        answer=AnswerText(tokenizer, params.stop),
        grammar=Grammar(schema, tokenizer, end_ids) if schema else None,
    )


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends an answer: the generation config's, else the config's, and the
    tokenizer's.
    """
    named = model.generation_config.eos_token_id if model.generation_config else None
    named = model.config.eos_token_id if named is None else named
    ids = set(named) if isinstance(named, list) else {named}
    return tuple(sorted(i for i in ids | {tokenizer.eos_token_id} if i is not None))
