"""The page of docs/results/distillation.json: arms over paired seeds, from the rows alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from draftsmith.bench.rows import interval, markdown, source

Rows = Sequence[dict[str, Any]]

WHAT = {
    "ce-text": "cross-entropy, ground truth",
    "fkl-text": "forward KL, ground truth",
    "ce": "cross-entropy (sequence-level KD where the target wrote the text)",
    "fkl": "forward KL (DistillSpec)",
    "rkl": "reverse KL",
    "jsd": "Jensen-Shannon, beta 0.5",
    "tv": "total variation",
    "lk": "LK: KL that becomes total variation",
    "ce-fkl": "half cross-entropy, half forward KL (FastDraft)",
    "two-stage": "forward KL, then total variation",
    "by-depth": "forward KL weighted by depth in a draft of 4",
    "on-policy": "forward KL, text written by the draft",
    "adaspec": "AdaSPEC, 40% of the tokens",
    "random-k": "a random 40%",
    "bottom-k": "the 40% with the smallest gaps",
    "easy-k": "the 40% that the reference finds easiest",
    "adaspec-tokens": "AdaSPEC, batches of 2.5 times the size",
    "fkl-compute": "forward KL, 2.5 times the steps",
}
# (claim, the arm that is to win, the other one)
CLAIMS = (
    ("distillation beats cross-entropy on the same text", "fkl", "ce"),
    ("distillation beats cross-entropy on the ground truth", "fkl", "ce-text"),
    ("answers of the target beat the ground truth", "fkl", "fkl-text"),
    ("text of the draft beats answers of the target", "on-policy", "fkl"),
    ("reverse KL beats forward KL", "rkl", "fkl"),
    ("Jensen-Shannon beats forward KL", "jsd", "fkl"),
    ("total variation beats forward KL", "tv", "fkl"),
    ("LK beats forward KL", "lk", "fkl"),
    ("two stages beat forward KL alone", "two-stage", "fkl"),
    ("two stages beat total variation alone", "two-stage", "tv"),
    ("half cross-entropy beats forward KL", "ce-fkl", "fkl"),
    ("weights by depth beat equal ones", "by-depth", "fkl"),
    ("the largest gaps beat the smallest", "adaspec", "bottom-k"),
    ("the largest gaps beat random tokens", "adaspec", "random-k"),
    ("AdaSPEC beats DistillSpec at equal steps", "adaspec", "fkl"),
    ("AdaSPEC beats DistillSpec at equal trained tokens", "adaspec-tokens", "fkl"),
    ("AdaSPEC beats DistillSpec at equal compute", "adaspec", "fkl-compute"),
    ("easy tokens beat AdaSPEC's", "easy-k", "adaspec"),
)


def page(rows: Rows) -> str:
    """Markdown: for each pair of models the arms, and what became of the claims."""
    pairs = dict.fromkeys(r["pair"] for r in rows)
    lines = [
        "# Distilling a draft: what helps",
        "",
        f"{source(rows)} An arm differs from forward KL on the pair's text by one thing. A seed is "
        "a draft pretrained with it and an order of the data, the same for all arms; each arm has "
        "the learning rate that did best for it on a further seed and other prompts "
        "(adaspec-tokens that of adaspec, fkl-compute and on-policy that of fkl). alpha: sum of "
        "min(p, q), teacher-forced over answers that the target wrote to held-out prompts at "
        "temperature 1; tau: tokens a target call, decoded with chains of "
        f"{rows[0]['K']} at temperature 1. Temperature 0 was not measured. Brackets: smallest and "
        "largest seed. Differences are paired over seeds, with a 95% bootstrap interval over the "
        "seeds alone, which is narrow for so few: read it with the number of seeds that agree. All "
        "seeds are measured on the same prompts, and the rows hold no figures of single ones, so "
        "what other prompts would give is in no interval.",
    ]
    for pair in pairs:
        lines += ["", *_of_pair([r for r in rows if r["pair"] == pair])]
    return "\n".join(lines) + "\n"


def difference(rows: Rows, arm: str, other: str, name: str) -> np.ndarray:
    """arm - other in a figure, one a seed that both have."""
    found = {(r["what"], r["seed"]): r[name] for r in rows}
    seeds = sorted(seed for what, seed in found if what == arm and (other, seed) in found)
    return np.array([found[arm, seed] - found[other, seed] for seed in seeds])


def verdict(values: np.ndarray) -> str:
    """Whether the first arm is better, worse, or neither can be said."""
    low, high = interval(values)
    return "holds" if low > 0 else "the contrary holds" if high < 0 else "undecided"


def _of_pair(rows: Rows) -> list[str]:
    first, arms = rows[0], [arm for arm in WHAT if any(r["what"] == arm for r in rows)]
    seeds = sorted({r["seed"] for r in rows})
    steps = min(r["steps"] for r in rows)
    text = next(r["data"] for r in rows if r["what"] == "fkl")
    lines = [
        f"## {first['pair']}",
        "",
        f"Target {first['target']}, text {text}, {len(seeds)} seeds, {steps} steps unless "
        "the arm says more.",
        "",
    ]
    head = ("arm", "what", "lr", "alpha", "tau", "alpha - fkl", "tau - fkl", "seconds")
    lines += markdown(head, [_arm(rows, arm) for arm in arms])
    claims = [c for c in CLAIMS if {c[1], c[2]} <= set(arms)]
    lines += ["", "| claim | alpha | tau | by alpha | by tau |", "|---|---|---|---|---|"]
    for words, arm, other in claims:
        by_name = [difference(rows, arm, other, name) for name in ("alpha", "tau")]
        cells = [_words(values, digits) for values, digits in zip(by_name, (4, 3), strict=True)]
        verdicts = [verdict(values) for values in by_name]
        lines.append(f"| {words} ({arm} - {other}) | {' | '.join([*cells, *verdicts])} |")
    return [*lines, "", _recommended(rows, steps)]


def _recommended(rows: Rows, steps: int) -> str:
    """The best arms of equal steps, and whether the first is better than the second."""
    means = {
        arm: float(np.mean([r["alpha"] for r in rows if r["what"] == arm]))
        for arm in WHAT
        if any(r["what"] == arm and r["steps"] == steps for r in rows)
    }
    best, next_best = sorted(means, key=lambda arm: -means[arm])[:2]
    ahead = _words(difference(rows, best, next_best, "alpha"), 4)
    return (
        f"Recommended: {best} ({WHAT[best]}), the highest alpha at {steps} steps; ahead of "
        f"{next_best} by {ahead} seeds. All of it is one pair of small models, a short run, and "
        "temperature 1: tune on your own held-out prompts before you trust an order of arms that "
        "lie close."
    )


def _arm(rows: Rows, arm: str) -> list[str]:
    runs = [r for r in rows if r["what"] == arm]
    cells = [arm, WHAT[arm], f"{runs[0]['lr']:g}"]
    for name, digits in (("alpha", 4), ("tau", 3)):
        values = [r[name] for r in runs]
        spread = f"{min(values):.{digits}f} to {max(values):.{digits}f}"
        cells.append(f"{np.mean(values):.{digits}f} ({spread})")
    for name, digits in (("alpha", 4), ("tau", 3)):
        values = difference(rows, arm, "fkl", name)
        cells.append("" if arm == "fkl" or not len(values) else _words(values, digits))
    return [*cells, f"{np.median([r['seconds'] for r in runs]):.0f}"]


def _words(values: np.ndarray, digits: int) -> str:
    low, high = interval(values)
    agree = int((np.sign(values) == np.sign(values.mean())).sum())
    numbers = f"{values.mean():+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"{numbers}, {agree} of {len(values)}"
