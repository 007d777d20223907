"""What an online draft learns from, choice against choice: replays that differ in one setting.

    python bench/evidence/online_choices.py                 # 27 replays of four minutes on one core
    python bench/evidence/online_choices.py worker=1 workers=2  # half of them, beside worker=0

A replay (recipe=online/replay) serves a stream whose topic changes, and learns from it between the
rounds; answers are the target's, so that arms are paired request by request. Drafts and ceilings
are those of bench/evidence/online.py, which has to have run. Finished replays are kept in
`trained`; rows and page, of all that are there, are docs/results/online-choices.*
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from draftsmith.bench.evidence.online_page import over_seeds
from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run, markdown, source
from draftsmith.bench.speed.workers import launch
from draftsmith.command import parse, run_command

ARMS = {  # name: what it means, and the settings that differ
    "base": ("all positions, mixed requests, jsd, 512 tokens listed", ()),
    "rejected": ("only positions where the draft was rejected", ("mix.positions=rejected",)),
    "recent": (
        "the newest 128 requests",
        ("mix.recent=1", "mix.reservoir=0", "mix.disagreement=0"),
    ),
    "reservoir": (
        "any request that is kept",
        ("mix.recent=0", "mix.reservoir=1", "mix.disagreement=0"),
    ),
    "disagreement": (
        "requests by their share of corrected tokens",
        ("mix.recent=0", "mix.reservoir=0", "mix.disagreement=1"),
    ),
    "fkl": ("forward KL", ("loss=fkl",)),
    "tv": ("total variation", ("loss=tv",)),
    "64-listed": ("the 64 likeliest of 4,096 tokens listed", ("replay.keep_top_k=64",)),
}
# A head in the draft's place, of bench/evidence/heads.py: 100 steps on the answers to GSM8K.
HEADS = {"eagle3": ("kind=eagle3", "loss=fkl", "unroll=4")}
MATHS, PYTHON, SPAN = 60, 400, 100
TOPIC = "stdlib"
HOW = (f"replay=gsm8k:{MATHS}+{TOPIC}:{PYTHON}", "idle_priority=false")

Rows = list[dict[str, Any]]


@dataclass
class Choices:
    seeds: int = 3
    arms: str = ",".join([*ARMS, *HEADS])
    worker: int = 0  # this process's share of the replays
    workers: int = 1
    online: str = "runs/online"  # of bench/evidence/online.py
    heads: str = "runs/heads"  # of bench/evidence/heads.py
    trained: str = "runs/online/choices"
    out: str = "docs/results"


def main(argv: list[str]) -> None:
    """Run the replays that aren't done, then write rows and page of all that are."""
    settings = parse(Choices, argv)
    # A seed's arms first: a grid that is broken off still has whole seeds.
    grid = [(arm, seed) for seed in range(settings.seeds) for arm in settings.arms.split(",")]
    for number, (arm, seed) in enumerate(grid):
        if number % settings.workers == settings.worker:
            replay(settings, arm, seed)
    files = sorted(Path(settings.trained).glob("*.json"))
    rows = [json.loads(file.read_text()) for file in files]
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "online-choices.json").write_text(json.dumps(rows, separators=(",", ":")) + "\n")
    (out / "online-choices.md").write_text(page(rows))
    Console().print(f"written: {out}/online-choices.json, {out}/online-choices.md")


def replay(settings: Choices, arm: str, seed: int) -> None:
    """One replay, and its row, unless it is there."""
    place = Path(settings.trained) / f"{arm}-{seed}"
    kept = place.with_suffix(".json")
    if kept.exists():
        return
    drafts = Path(settings.online) / f"seed-{seed}"
    if arm in HEADS:
        need("eagle3", f"{settings.heads}/{arm}-{seed}/drafter")
        how = [*HEADS[arm], f"drafter={settings.heads}/{arm}-{seed}/drafter"]
    else:
        need("online", f"{drafts}/ceiling/drafter")
        how = [*ARMS[arm][1], f"drafter={drafts}/frozen/drafter"]
        how.append(f"replay.ceiling={drafts}/ceiling/drafter")
    launch("online", "recipe=online/replay", f"out={place}", f"seed={seed}", *HOW, *how)
    lines = [json.loads(line) for line in (place / "stream.jsonl").read_text().splitlines()]
    served = sorted((x for x in lines if x["topic"] == TOPIC), key=lambda x: x["index"])
    row = {"what": arm, "settings": how, "seed": seed, **about_run()}
    row["alpha"] = {n: [round(x["alpha"][n], 5) for x in served] for n in served[0]["alpha"]}
    row |= {n: [x[n] for x in served] for n in ("index", "rounds", "emitted", "version")}
    kept.write_text(json.dumps(row))


def page(rows: Rows) -> str:
    """Markdown."""
    seeds = {row["seed"] for row in rows if row["what"] in ARMS}
    lines = [
        "# What an online draft learns from",
        "",
        f"{source(rows)} Replays of "
        f"{MATHS} GSM8K and {PYTHON} Python requests (target-15m, 64 tokens, temperature 1, "
        f"{len(seeds)} seeds, each with drafts and a stream of its own), and a learner that takes "
        "a step a request; an arm differs from base by one setting, the learning rate is 5e-3 "
        "(Muon) for all. alpha of the served draft, teacher-forced on answers that are the same "
        f"in all arms, after so many requests of the new topic (means of the following {SPAN}). "
        "The last columns are of the last ones: the difference to base, paired by request, with "
        "its 95% interval (bootstrap over seeds, then requests) and the seeds that agree; and the "
        "share of the gap between frozen and ceiling draft that was closed. base's settings were "
        "chosen on this same change of topic.",
        "",
        *table(rows),
    ]
    if any(row["what"] in HEADS for row in rows):
        lines += [
            "",
            "## A head in the draft's place",
            "",
            "Trained for 100 steps on answers to GSM8K; alpha over its four depths, with base's "
            "settings and forward KL. gain: online - frozen on the last requests.",
            "",
            *head_table(rows),
        ]
    return "\n".join(lines) + "\n"


def head_table(rows: Rows) -> list[str]:
    """A draft a row, of what was served in each span of requests."""
    spans = range(SPAN, PYTHON, SPAN)
    body = []
    for head in HEADS:
        tables = [
            {name: np.array(row["alpha"][name]) for name in ("frozen", "online")}
            for row in rows
            if row["what"] == head
        ]
        for name in ("frozen", "online") if tables else ():
            means = [np.mean([t[name][at : at + SPAN].mean() for t in tables]) for at in spans]
            gain = ""
            if name == "online":
                last = [{n: values[spans[-1] :] for n, values in t.items()} for t in tables]
                each = [t["online"].mean() - t["frozen"].mean() for t in last]
                low, high = over_seeds(last, lambda a: a["online"] - a["frozen"])
                gain = f"{np.mean(each):+.4f} [{low:+.4f}, {high:+.4f}]"
            body.append([f"{head}, {name}", *(f"{m:.3f}" for m in means), gain])
    return markdown(("draft", *(f"after {at}" for at in spans), "gain"), body)


def table(rows: Rows) -> list[str]:
    """An arm a row, of what was served in each span of requests."""
    spans = range(SPAN, PYTHON, SPAN)
    body = []
    for arm, (meaning, _) in ARMS.items():
        pairs = paired(rows, arm)
        if not pairs:
            continue
        means = [np.mean([p["arm"][at : at + SPAN].mean() for p in pairs]) for at in spans]
        last = [{name: values[spans[-1] :] for name, values in p.items()} for p in pairs]
        mean = {name: np.mean([x[name].mean() for x in last]) for name in last[0]}
        closed = (mean["arm"] - mean["frozen"]) / (mean["ceiling"] - mean["frozen"])
        difference = ""
        if arm != "base":
            each = [x["arm"].mean() - x["base"].mean() for x in last]
            low, high = over_seeds(last, lambda a: a["arm"] - a["base"])
            agree = sum((d > 0) == (np.mean(each) > 0) for d in each)
            difference = f"{np.mean(each):+.4f} [{low:+.4f}, {high:+.4f}], {agree} of {len(each)}"
        body.append([arm, meaning, *(f"{m:.3f}" for m in means), difference, f"{closed:.0%}"])
    after = [f"after {at}" for at in spans]
    return markdown(("arm", "what is learned from", *after, "arm - base", "closed"), body)


def paired(rows: Rows, arm: str) -> list[dict[str, np.ndarray]]:
    """alpha of the same requests, in their order, a seed an item: of the arm and of base."""
    found = {(row["what"], row["seed"]): row for row in rows}
    pairs = []
    for seed in sorted({row["seed"] for row in rows}):
        if (arm, seed) not in found or ("base", seed) not in found:
            continue
        own, base = found[arm, seed], found["base", seed]
        same = sorted(set(own["index"]) & set(base["index"]))
        columns = {"arm": (own, "online"), "base": (base, "online")}
        columns |= {name: (base, name) for name in ("frozen", "ceiling")}
        pair = {}
        for name, (row, draft) in columns.items():
            of = dict(zip(row["index"], row["alpha"][draft], strict=True))
            pair[name] = np.array([of[index] for index in same])
        pairs.append(pair)
    return pairs


if __name__ == "__main__":
    run_command(main, Choices)
