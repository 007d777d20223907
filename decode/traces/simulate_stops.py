"""Stopping rules replayed on a trace, exactly, without a model.

A trace with a round at every position (`python -m draftsmith trace every=true`, chains, coupled
sampling) holds all that any rule can meet: the answer is always the same one, and what is drafted
after a position, and kept of it, depends on the position alone. A replay begins at the first
position, drafts as many tokens there as the rule says, and goes on where that round would have
ended. The counters are those of the decoder with batch_size=1.

    modelled speed-up = tokens emitted / (rounds v + tokens drafted c)
    v = t_verify / t_plain,  c = t_draft / t_plain

A rule (`Stop`) maps all prompts at once to how many tokens it drafts at each position, and starts
afresh each time. No rule emits as much in as few rounds as `oracle` and drafts less;
`oracle_after` is where a perfect acceptance head would stop.

Shapes: T positions of an answer at which a round may begin, K the longest draft, n rows of a trace.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.decode.engine.request import Counters
from draftsmith.decode.evaluate import metrics
from draftsmith.decode.policies.policy import Entropy, Outcome
from draftsmith.decode.traces.store import Trace
from draftsmith.decode.tree_shapes import chain_plan
from draftsmith.models.scorers import Scorer, read_scalar

COLUMNS = ("prompt", "round", "position", "parent", "depth", "log_q", "entropy", "kept", "on_path")
ORDER = ("depth", "round", "prompt")  # of rows, the last first
BLOCK = 1 << 14  # rows that a head scores at once


@dataclass(frozen=True)
class Rounds:
    """A prompt's rounds, one at each position of its answer but the first, which comes with the
    prefill. kept_TK: whether the token and all before it in the chain are kept; score_TK: the
    estimated log chance that a token is kept.
    """

    log_q_TK: np.ndarray
    entropy_TK: np.ndarray
    kept_TK: np.ndarray
    score_TK: np.ndarray | None = None

    @cached_property
    def run_T(self) -> np.ndarray:
        """How many tokens of the longest draft are kept."""
        return self.kept_TK.sum(1)


Stop = Callable[[Sequence[Rounds]], list[np.ndarray]]  # tokens to draft [T] of each prompt


def each(rule: Callable[[Rounds], np.ndarray]) -> Stop:
    """A rule that knows nothing of other prompts."""
    return lambda prompts: [rule(rounds) for rounds in prompts]


def rounds_of(trace: Trace, score_n: Tensor | None = None) -> list[Rounds]:
    """The rounds of each prompt, in the order of their numbers. score_n: what `log_chances` gives.
    ValueError for a trace that lacks rounds, or holds more than chains.
    """
    settings = trace.about.get("settings", {})
    if settings.get("rule", "coupled") != "coupled" and settings.get("temperature"):
        raise _not_every(f"rule {settings['rule']}, whose draws are the round's")
    column = {name: trace.columns[name].numpy() for name in COLUMNS}
    if score_n is not None:
        column["score"] = score_n.float().numpy()
    order = np.lexsort([column[name] for name in ORDER])
    K = int(column["depth"].max())
    if len(order) % K:
        raise _not_every(f"{len(order)} rows, which are no whole chains of {K}")
    table = {name: values[order].reshape(-1, K) for name, values in column.items()}
    depth_K = np.arange(1, K + 1)
    if (table["depth"] != depth_K).any() or (table["parent"] != depth_K - 1).any():
        raise _not_every("trees, or chains of several lengths")
    found = []
    for prompt in np.unique(table["prompt"]):
        own = {k: values[table["prompt"][:, 0] == prompt] for k, values in table.items()}
        round_T = own["round"][:, 0]
        if (np.diff(own["position"][:, 0]) != 1).any() or (
            round_T != np.arange(len(round_T))
        ).any():
            raise _not_every(f"prompt {prompt} with rounds that skip positions")
        kept_TK = own["kept"] & own["on_path"]
        found.append(Rounds(own["log_q"], own["entropy"], kept_TK, own.get("score")))
    return found


@torch.inference_mode()
def log_chances(scorer: Scorer, trace: Trace) -> Tensor:
    """Log chance [n] that each row's token is kept, by an acceptance head, in a trace of chains. A
    head that reads the state after a token finds it at the next token of its chain: the last one
    gets 0, which no rule reads.
    """
    columns, config = trace.columns, scorer.config
    order_n = torch.from_numpy(np.lexsort([columns[name].numpy() for name in ORDER]))
    state_n = order_n.roll(-1) if config.state == "token" else order_n
    found_n = torch.empty(len(order_n))
    for at, state_at in zip(order_n.split(BLOCK), state_n.split(BLOCK), strict=True):
        read = [read_scalar(name, columns[name][at])[:, None] for name in config.scalars]
        state_nH = columns["draft_state"][state_at, : config.hidden].float()
        logits = scorer(torch.cat([state_nH, *read], 1))
        found_n[at] = F.logsigmoid(scorer.calibrated(logits))
    if config.state == "token":
        found_n[columns["depth"] == columns["depth"].max()] = 0
    return found_n


def fixed(count: int) -> Stop:
    """Always so many tokens, 0 for plain decoding."""

    def drafted(rounds: Rounds) -> np.ndarray:
        length, longest = rounds.kept_TK.shape
        if not 0 <= count <= longest:
            raise ValueError(f"fixed: got {count} tokens, expected 0 to the trace's {longest}")
        return np.full(length, count)

    return each(drafted)


def confidence(threshold: float) -> Stop:
    """Policy `confidence`: stop once a token's probability is below."""
    return each(lambda rounds: _first(np.exp(rounds.log_q_TK) < threshold))


def entropy(limit: float) -> Stop:
    """Stop once AdaEDL's bound on acceptance is below a limit that stays as it is."""
    return each(lambda rounds: _first(_bound(rounds, 0.2) < limit))


def adaedl(gamma: float = 0.2, limit: float = 0.6) -> Stop:
    """Policy `entropy`: the limit follows the rounds before, of earlier prompts too."""

    def stop(prompts: Sequence[Rounds]) -> list[np.ndarray]:
        plan = chain_plan(prompts[0].kept_TK.shape[1])
        policy, found = Entropy(plan, gamma, limit), []
        for rounds in prompts:
            drafted_T = np.zeros(len(rounds.kept_TK), int)
            bound_TK = _bound(rounds, gamma)
            for at in starts(rounds, drafted_T):
                drafted_T[at] = _first(bound_TK[at : at + 1] < policy.limit)[0]
                kept = min(drafted_T[at], rounds.run_T[at])
                policy.observe(Outcome(plan, int(drafted_T[at]), [(0,) * int(kept)]))
            found.append(drafted_T)
        return found

    return stop


def capped(stop: Stop, most: int) -> Stop:
    """A rule with at most so many tokens: the decoder's K."""
    return lambda prompts: [np.minimum(drafted_T, most) for drafted_T in stop(prompts)]


def chance(threshold: float, *, least: int = 1, newest: bool = True, by: str = "score") -> Stop:
    """Policy `acceptance`: stop once something drafted has been rejected with a chance above
    `threshold`, after `least` tokens or more.

    newest: whether the newest token's score counts; not of a head that reads the state after it.
    by: `score`, or `log_q`: policy `depth` at 1 - threshold.
    """

    def drafted(rounds: Rounds) -> np.ndarray:
        path_TK = getattr(rounds, f"{by}_TK").cumsum(1, dtype=np.float32)
        if not newest:
            path_TK = np.pad(path_TK[:, :-1], ((0, 0), (1, 0)))
        enough_TK = np.exp(path_TK) < 1 - threshold
        enough_TK[:, : least - 1] = False
        return _first(enough_TK)

    return each(drafted)


def oracle() -> Stop:
    """Draft what will be kept, as far as the answer goes, and nothing else."""
    return each(lambda rounds: np.minimum(rounds.run_T, np.arange(len(rounds.run_T))[::-1]))


def oracle_after() -> Stop:
    """Stop once a token that will be rejected has been drafted."""
    return each(lambda rounds: _first(~rounds.kept_TK))


def starts(rounds: Rounds, drafted_T: np.ndarray) -> Iterator[int]:
    """The positions at which rounds begin; drafted_T is read when its round is over."""
    at = 0
    while at < len(rounds.run_T):
        yield at
        at += int(min(drafted_T[at], rounds.run_T[at])) + 1


def replay(stop: Stop, prompts: Sequence[Rounds]) -> list[Counters]:
    """What the decoder counts of each prompt with that rule."""
    found = []
    for rounds, drafted_T in zip(prompts, stop(prompts), strict=True):
        counters = Counters()
        for at in starts(rounds, drafted_T):
            drafted = int(drafted_T[at])
            accepted = min(drafted, int(rounds.run_T[at]))
            counters.record(drafted, accepted, min(accepted + 1, len(rounds.run_T) - at))
        found.append(counters)
    return found


def costs(counters: Sequence[Counters], c: float, v: float = 1.0) -> list[float]:
    """Modelled time of each prompt, in steps of plain decoding."""
    return [one.rounds * v + one.drafted * c for one in counters]


def speedup(counters: Sequence[Counters], c: float, v: float = 1.0) -> float:
    """Modelled, over all prompts."""
    return sum(one.emitted for one in counters) / sum(costs(counters, c, v))


def figures(counters: Sequence[Counters], c: float, v: float = 1.0) -> dict[str, Any]:
    """Of a replay: tau, K (tokens drafted a round), the modelled speed-up with its interval over
    prompts, and SpecDec++'s discard rate (drafts thrown away) and verification rate (target calls),
    both a token emitted.
    """
    one = metrics.total(counters)
    kept = sum(count * kept for kept, count in enumerate(one.histogram))
    emitted = [own.emitted for own in counters]
    return {
        "tau": one.emitted / one.rounds,
        "K": one.drafted / one.rounds,
        "speedup": speedup(counters, c, v),
        "speedup_interval": metrics.ratio_interval(emitted, costs(counters, c, v)),
        "discard_rate": (one.drafted - kept) / one.emitted,
        "verification_rate": one.rounds / one.emitted,
    }


def gain(
    after: Sequence[Counters], before: Sequence[Counters], c: float, v: float = 1.0
) -> tuple[float, list[float]]:
    """How many times faster one rule is than another on the same prompts, with its interval."""
    same = all(a.emitted == b.emitted for a, b in zip(after, before, strict=True))
    assert same, "two rules gave different answers"
    slow, fast = costs(before, c, v), costs(after, c, v)
    return sum(slow) / sum(fast), metrics.ratio_interval(slow, fast)


def tune(
    stops: Mapping[str, Stop], prompts: Sequence[Rounds], c: float, v: float = 1.0
) -> tuple[str, float]:
    """The name of the fastest rule on these prompts (of equals the first), and its speed-up."""
    found = {name: speedup(replay(stop, prompts), c, v) for name, stop in stops.items()}
    best = max(found, key=lambda name: found[name])
    return best, found[best]


def optimal_threshold(t_draft: float, t_verify: float, delta: float = 0.0) -> float:
    """Where SpecDec++'s decision process stops (arXiv 2405.19715): once the chance of a rejection
    reaches (c2 + delta) / (c1 + c2 + delta), with c1 = t_draft what a token thrown away costs, and
    c2 = t_verify - t_draft what a further round does. delta: what going on is worth beyond that.
    """
    if not 0 < t_draft < t_verify < math.inf or not delta >= 0:
        raise ValueError(
            f"optimal threshold: got t_draft={t_draft}, t_verify={t_verify}, delta={delta}, "
            "expected 0 < t_draft < t_verify, and delta from 0; a draft as slow as its target "
            "gains nothing"
        )
    return (t_verify - t_draft + delta) / (t_verify + delta)


def _first(enough_TK: np.ndarray) -> np.ndarray:
    """Tokens drafted [T] where the one after which it is enough is the last."""
    stops_T = enough_TK.argmax(1) + 1
    return np.where(enough_TK.any(1), stops_T, enough_TK.shape[1])


def _bound(rounds: Rounds, gamma: float) -> np.ndarray:
    """AdaEDL's bound on the acceptance of each token [T, K]."""
    return np.subtract(1, np.sqrt(gamma * rounds.entropy_TK))


def _not_every(what: str) -> ValueError:
    return ValueError(
        f"replay: got a trace of {what}, expected a whole chain at every position; record it with "
        "every=true, tree=chain and rule=coupled"
    )
