"""The likeliest tokens of each place of an answer: what a server is asked, and what it tells."""

import math
from typing import Any

from draftsmith.decode.sampling import SamplingParams

TopLogprobs = list[dict[int, float]]

AS_IT_IS = SamplingParams(1.0).law

# What the listed probabilities may add up to, in a server's rounding.
MOST = 1.01


def check_asked(k: int, endpoint: str, api: str, params: list[SamplingParams]) -> None:
    """Raises ValueError where a server couldn't tell `k` log-probabilities so that they're sure."""
    if k and not (k > 0 and endpoint and api in ("auto", "tokens")):
        raise ValueError(
            f"endpoint.top_logprobs: got {k} with endpoint.url={endpoint!r}, endpoint.api={api}, "
            "expected 0 (none), or some of a server that is asked by endpoint.api=tokens; with a "
            "local target, train with cache=<a folder> cache.top_k=<k> instead"
        )
    laws = {given.law for given in params}
    if k and laws != {AS_IT_IS}:
        raise ValueError(
            f"endpoint.top_logprobs: got temperature, top_k, top_p, min_p = {laws}, expected "
            f"{AS_IT_IS}: servers differ in whether they tell log-probabilities before these act "
            "or after; only without them is it the same"
        )


def read_top_logprobs(choice: dict[str, Any], tokens: int, size: int) -> TopLogprobs:
    """The log-probabilities {token: value} of each of an answer's `tokens`, likeliest first, below
    `size`. ValueError where they aren't there, aren't told by ids, or can't be log-probabilities.
    """
    told = (choice.get("logprobs") or {}).get("top_logprobs") or []
    what, found = "", []
    if len(told) != tokens or not all(told):
        what = f"{len(told)} for {tokens} tokens"
    for entry in told if not what else []:
        named = {name.removeprefix("token_id:"): float(value) for name, value in entry.items()}
        ids = [name for name in named if name.isdecimal() and int(name) < size]
        by_id = len(ids) == len(named) and all(name.startswith("token_id:") for name in entry)
        if not by_id or not math.fsum(map(math.exp, named.values())) <= MOST:
            what = f"{entry!r:.120}"
            break
        ordered = sorted(named.items(), key=lambda pair: -pair[1])
        found.append({int(name): round(value, 6) for name, value in ordered})
    if what:
        raise ValueError(
            f"logprobs.top_logprobs: got {what}, expected for each token of the answer some "
            f'"token_id:<number below {size}>": <log-probability>, as vLLM tells them with '
            "return_tokens_as_token_ids; leave out endpoint.top_logprobs with this server"
        )
    return found
