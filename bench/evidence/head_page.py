"""The page of docs/results/heads.json: tau of each kind of head over seeds, from the rows alone."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from draftsmith.bench.rows import markdown, source
from draftsmith.decode.evaluate.metrics import paired_difference, ratio_interval

Rows = Sequence[dict[str, Any]]
ORDER = ("medusa", "hydra", "hydra++", "eagle1", "eagle3")
TREES = ("chain", "static", "dynamic", "dynamic, sharpness 2")


def page(rows: Rows) -> str:
    """Markdown: tau by kind and tree, acceptance by depth, equal draft time, and the claims."""
    first = rows[0]
    kinds = [kind for kind in ORDER if any(r["what"] == kind for r in rows)]
    seeds = sorted({r["seed"] for r in rows})
    sizes = {tree: r["N"] for tree in TREES for r in rows if r["tree"] == tree}
    lines = [
        "# Heads on one target",
        "",
        f"{source(rows)} Target "
        f"{first['target']}, {first['n_prompts']} held-out prompts of {first['data']}, "
        f"{first['max_new_tokens']} new tokens, bf16, seeds {', '.join(map(str, seeds))}. Nodes, "
        f"the root included: {', '.join(f'{tree} {n}' for tree, n in sizes.items())}. tau: tokens "
        "a target call, over all seeds; its interval is 95%, bootstrap over prompts; in brackets "
        "the smallest and largest seed. Each kind is trained by its recipe on the same answers, by "
        "the optimizer that did best for it in short trials.",
    ]
    for temperature in sorted({r["temperature"] for r in rows}):
        here = [r for r in rows if r["temperature"] == temperature]
        lines += ["", f"## Temperature {temperature:g}", ""]
        lines += markdown(("head", *sizes), [[k, *taus(here, k, sizes)] for k in kinds])
        lines += ["", "Acceptance of a chain by depth, given that all before was accepted:", ""]
        depths = max(len(r["acceptance_conditional"]) for r in here if r["tree"] == "chain")
        head = ("head", *(f"depth {d}" for d in range(1, depths + 1)))
        lines += markdown(head, [[k, *by_depth(here, k, depths)] for k in kinds])
        lines += ["", *_equal_time(here, kinds), "", "Differences, paired over prompts:", ""]
        lines += [f"- {words}" for words in _claims(here, kinds, list(sizes))]
    return "\n".join(lines) + "\n"


def pooled(rows: Rows, what: str, tree: str) -> tuple[list[float], list[float]]:
    """(emitted, rounds) of each prompt, summed over the seeds."""
    runs = [r for r in rows if r["what"] == what and r["tree"] == tree]
    emitted, rounds = (np.sum([r[name] for r in runs], axis=0) for name in ("emitted", "rounds"))
    return list(emitted), list(rounds)


def taus(rows: Rows, what: str, trees: Sequence[str] | dict[str, int]) -> list[str]:
    cells = []
    for tree in trees:
        emitted, rounds = pooled(rows, what, tree)
        low, high = ratio_interval(emitted, rounds)
        taus = [r["tau"] for r in rows if r["what"] == what and r["tree"] == tree]
        spread = f" ({min(taus):.2f} to {max(taus):.2f})" if len(taus) > 1 else ""
        cells.append(f"{sum(emitted) / sum(rounds):.2f} [{low:.2f}, {high:.2f}]{spread}")
    return cells


def by_depth(rows: Rows, what: str, depths: int) -> list[str]:
    runs = [r["acceptance_conditional"] for r in rows if r["what"] == what and r["tree"] == "chain"]
    means = [f"{sum(values) / len(values):.3f}" for values in zip(*runs, strict=True)]
    return means + ["-"] * (depths - len(means))


def _equal_time(rows: Rows, kinds: Sequence[str]) -> list[str]:
    """Of each kind the deepest chain that is drafted as fast as four tokens of the last kind."""
    budget = _draft_ms(rows, kinds[-1], 4)
    lines = [
        f"Chains whose drafting takes at most the {budget:.2f} ms of four tokens of {kinds[-1]}:",
        "",
    ]
    body = []
    for kind in kinds:
        mine = [r for r in rows if r["what"] == kind and r["tree"].startswith("chain ")]
        # Within the spread of the timing.
        fit = [r["K"] for r in mine if _draft_ms(rows, kind, r["K"]) <= 1.02 * budget]
        if not fit:
            body.append([kind, "-", f"{_draft_ms(rows, kind, 1):.2f}", "-"])
            continue
        K = max(fit)
        time = f"{_draft_ms(rows, kind, K):.2f}"
        body.append([kind, str(K), time, *taus(rows, kind, [f"chain {K}"])])
    return [*lines, *markdown(("head", "K", "draft ms a round", "tau"), body)]


def _draft_ms(rows: Rows, what: str, K: int) -> float:
    """Of a chain; the smallest over the seeds: whatever else the machine does can only add."""
    chains = (r for r in rows if r["what"] == what and r["tree"].startswith("chain"))
    return min(r["draft_ms"] for r in chains if r["K"] == K)


def _claims(rows: Rows, kinds: Sequence[str], trees: Sequence[str]) -> list[str]:
    """What the literature orders, with the difference that was found."""
    found = [
        difference(rows, f"{b} - {a}, chain", (b, "chain"), (a, "chain"))
        for a, b in pairwise(kinds)
    ]
    for a, b in pairwise(trees):
        for kind in kinds:
            found.append(difference(rows, f"{kind}: {b} - {a}", (kind, b), (kind, a)))
    return found


def difference(rows: Rows, words: str, after: tuple[str, str], before: tuple[str, str]) -> str:
    value, (low, high) = paired_difference(pooled(rows, *after), pooled(rows, *before))
    sure = "" if low > 0 or high < 0 else ", not told apart"
    return f"{words}: {value:+.2f} [{low:+.2f}, {high:+.2f}]{sure}"
