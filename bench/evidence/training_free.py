"""Drafts that are looked up, and stores beside trained drafters, in one mixed stream of requests.

    python bench/evidence/training_free.py drafters=draft=FOLDER,eagle3=FOLDER
    python bench/evidence/training_free.py drafters=... on=twin target=TWIN prompts=3

The stream is what a server sees: Spec-Bench's categories, problems, source code, and problems that
are asked three times, by lot, one at a time. Each request is decoded plainly, by each kind of
look-up, by each drafter (chains as deep as its folder's K), and by the store and it, side by side
(suffix+NAME) and fused (suffix++NAME, where it can be); the ways of a request follow each other by
lot, and each has a store of its own, empty at first. What counts is the decoding alone, prefills
excluded, by the thread's own clock where there is one thread. better: a way's figure over that of
the better of its two parts, tau and tokens a second; resamples are of prompts, and compare the
parts anew, so the interval is that of a ratio to the larger. Prompts are left out that any drafter
has no room for. Rows and page: <out>/training-free.*, where those of other targets and trees stay.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track

from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run, beside, markdown, source, write_table
from draftsmith.bench.speed.arms import decode_by
from draftsmith.command import parse, run_command
from draftsmith.decode.drafters.load import kept_defaults, load_decoded, load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.evaluate.metrics import bootstraps
from draftsmith.decode.prompts.prompts import Prompt, load_prompts
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.untrained.texts import StoredDrafter
from draftsmith.models.target import TargetSpec
from draftsmith.train.run.recipe import gsm8k

PLAIN, ALL, AGAIN = "plain", "all", "asked again"
# Spec-Bench's own first category, of which its file names the topics.
TOPICS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass
class TrainingFree:
    drafters: str = ""  # name=folder, comma between
    looked: str = "ngram,suffix,recycling,stand"
    store: str = "suffix"  # the one of these that is beside drafters
    joined: str = "+,++"  # how: side by side, fused
    target: str = field(default_factory=lambda: gsm8k("target"))
    on: str = "target"  # what its rows are called; those of others stay
    problems: str = field(default_factory=lambda: gsm8k("data"))
    questions: str = "../shared/data/spec_bench/question.jsonl"
    prompts: int = 16  # of each kind of text
    longest: int = 0  # tokens of a prompt; 0: as long as fit
    times: int = 3  # that a prompt of the repetitive part is asked
    K: int = 8  # the deepest copy
    tree: str = "chain"  # of all
    policy: str = "fixed"  # of all; another one is named beside the tree
    temperatures: str = "0,1"
    max_new_tokens: int = 48
    dtype: str = "auto"
    threads: int = 1
    out: str = "docs/results"


@dataclass
class Way:
    """A decoder, where its drafter's weights are, and which two others it is made of."""

    decoder: Decoder
    folder: str = ""
    parts: tuple[str, ...] = ()


def main(argv: list[str]) -> None:
    settings = parse(TrainingFree, argv)
    need("target", settings.target)
    decode_by(settings.threads)
    model, tokenizer = load_decoded(TargetSpec(settings.target, dtype=settings.dtype), "cpu")
    ways = every_way(settings, model, tokenizer)
    context = min(way.decoder.context for way in ways.values())
    room = context - settings.max_new_tokens
    asked = stream(settings, tokenizer, min(room, settings.longest or room))
    rows, run = list[dict[str, Any]](), about_run()
    tree = ", ".join([settings.tree] + [settings.policy] * (settings.policy != "fixed"))
    kinds: dict[str, dict[Any, list[int]]] = {ALL: {}}
    for i, (kind, prompt) in enumerate(asked):
        for of in (ALL, kind):
            kinds.setdefault(of, {}).setdefault((kind, prompt.index), []).append(i)
    for temperature in map(float, settings.temperatures.split(",")):
        counted = measured(ways, asked, temperature, settings)
        for of, requests in kinds.items():
            for name, way in ways.items():
                about = {"what": name, "on": settings.on, "of": of, "tree": tree}
                about |= {"temperature": temperature, "target": settings.target}
                if name != PLAIN:
                    row = about | figures(counted, name, way.parts, requests) | run
                    rows.append(row | {"megabytes": held(way) / 2**20})
    out = Path(settings.out)
    rows = beside(out / "training-free.json", rows, "on", "tree")
    write_table(out, "training-free", rows, page(rows))


def every_way(settings: TrainingFree, model: Any, tokenizer: Any) -> dict[str, Way]:
    """By name, plain decoding first."""
    ways = {PLAIN: Way(Decoder(model, tokenizer))}

    def add(way: str, name: str, K: int, *about: Any) -> None:
        drafter = load_drafter(name, model, tokenizer)
        made = Decoder(model, tokenizer, drafter, K=K, tree=settings.tree, policy=settings.policy)
        ways[way] = Way(made, *about)

    for name in settings.looked.split(","):
        if settings.tree == "chain" or name != "ngram":
            add(name, name, settings.K)
    for part in filter(None, settings.drafters.split(",")):
        name, _, folder = part.partition("=")
        if not folder:
            raise ValueError(f"drafters: got {part}, expected name=FOLDER,...")
        add(name, folder, int(kept_defaults(folder)["K"] or 4), folder)
        for plus in settings.joined.split(","):
            both, parts = f"{settings.store}{plus}{name}", (settings.store, name)
            try:
                add(both, f"{settings.store}{plus}{folder}", settings.K, folder, parts)
            except ValueError as refused:
                print(f"{both}: {refused}")
    return ways


def held(way: Way) -> int:
    """Bytes of a drafter's weights and of its store."""
    weights = sum(file.stat().st_size for file in Path(way.folder).glob("*.safetensors"))
    drafter = way.decoder.drafter
    looked = getattr(drafter, "looked", drafter)
    kept = vars(looked.store).values() if isinstance(looked, StoredDrafter) else ()
    store = sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))
    return store + (weights if way.folder else 0)


def stream(settings: TrainingFree, tokenizer: Any, room: int) -> list[tuple[str, Prompt]]:
    """Requests of at most so many tokens, with what they are, by lot."""
    many, kinds = settings.prompts, dict[str, list[Prompt]]()
    fresh = many // settings.times + 1
    for kind, place, limit in (
        ("problems", settings.problems, many + fresh),
        ("code", "stdlib", many),
        ("", settings.questions, None),
    ):
        if kind or Path(place).exists():
            split = "report" if kind else "all"
            for one in load_prompts(place, tokenizer, limit=limit, split=split):
                own = "conversation" if one.category in TOPICS else one.category
                kinds.setdefault(kind or own, []).append(one)
    fitting = {
        kind: [one for one in some if len(one.tokens) <= room] for kind, some in kinds.items()
    }
    again = fitting["problems"][many:] * settings.times
    asked = [(kind, one) for kind, some in fitting.items() for one in some[:many]]
    asked += [(AGAIN, one) for one in again]
    random.Random(0).shuffle(asked)
    return asked


def measured(
    ways: dict[str, Way],
    asked: list[tuple[str, Prompt]],
    temperature: float,
    settings: TrainingFree,
) -> dict[str, np.ndarray]:
    """Of each way, by request: emitted tokens, rounds, seconds, and whether it says what plain
    decoding says.
    """
    params = SamplingParams(temperature, max_new_tokens=settings.max_new_tokens)
    counted: dict[str, list[Any]] = {name: [] for name in ways}
    for way in ways.values():
        way.decoder.generate([max((one.tokens for _, one in asked), key=len)], params)
        if way.decoder.drafter is not None and way.decoder.drafter.remembers:
            way.decoder.drafter.forget()
    lot = random.Random(1)
    for i, (_, prompt) in enumerate(track(asked, f"temperature {temperature:g}")):
        said: dict[str, list[int]] = {}
        for name in lot.sample(list(ways), len(ways)):
            [done] = ways[name].decoder.generate([prompt.tokens], params, indices=[i])
            told = done.counters
            counted[name].append([told.emitted, told.rounds, told.decode_seconds, 0])
            said[name] = done.tokens
        for name, tokens in said.items():
            counted[name][-1][-1] = tokens == said[PLAIN]
    return {name: np.array(found) for name, found in counted.items()}


def figures(
    counted: dict[str, np.ndarray],
    name: str,
    parts: tuple[str, ...],
    requests: dict[Any, list[int]],
) -> dict[str, Any]:
    """tau, tokens a second over plain decoding's, and both over the better part's. requests: by
    prompt.
    """
    every = sorted(i for some in requests.values() for i in some)
    by_prompt = {
        own: np.array([counted[own][some].sum(0) for some in requests.values()])
        for own in (PLAIN, name, *parts)
    }

    def rate(own: str, by: int, i: np.ndarray) -> Any:
        total = by_prompt[own][i].sum(0)
        return total[0] / total[by]

    measures: dict[str, Callable[[np.ndarray], Any]] = {
        "tau": lambda i: rate(name, 1, i),
        "speedup": lambda i: rate(name, 2, i) / rate(PLAIN, 2, i),
    }
    for what, by in (("better_tau", 1), ("better_speed", 2)) if parts else ():
        measures[what] = lambda i, by=by: rate(name, by, i) / max(rate(p, by, i) for p in parts)
    low, high = bootstraps(lambda i: np.array([f(i) for f in measures.values()]), len(requests))
    row = {"requests": len(every), "identical": int(counted[name][every, 3].sum())}
    halves = [counted[name][half].sum(0) for half in np.array_split(every, min(2, len(every)))]
    row["tau_halves"] = [float(half[0] / half[1]) for half in halves]
    for k, (what, measure) in enumerate(measures.items()):
        row[what] = float(measure(np.arange(len(requests))))
        row[f"{what}_interval"] = [float(low[k]), float(high[k])]
    return row


def page(rows: list[dict[str, Any]]) -> str:
    """Markdown: a table for each target, tree, temperature and kind of text."""
    lines = [
        "# Drafts that are looked up, and stores beside trained drafters",
        "",
        f"{source(rows)} One mixed stream, a request at a time. Speed-up: decoding alone, over "
        "plain decoding; MB: weights and store. 95% intervals over prompts.",
    ]
    keys = ("on", "tree", "temperature", "of")
    head = ("drafter", "tau", "by halves", "over the better part's", "speed-up", "over the better")
    for place in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        own = [row for row in rows if tuple(row[key] for key in keys) == place]
        title = "{}, {}, temperature {:g}: {}".format(*place)
        body = []
        for row in own:
            tau, better, speedup, faster = (
                "{:.2f} [{:.2f}, {:.2f}]".format(row[what], *row[f"{what}_interval"])
                if what in row
                else "-"
                for what in ("tau", "better_tau", "speedup", "better_speed")
            )
            halves = ", ".join(f"{tau:.2f}" for tau in row["tau_halves"])
            same = f"{row['identical']} of {row['requests']}"
            mega = f"{row['megabytes']:.1f}"
            body.append([row["what"], tau, halves, better, speedup, faster, mega, same])
        lines += ["", f"## {title}", "", *markdown((*head, "MB", "same answers"), body)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_command(main, TrainingFree)
