"""What an acceptance head gains over simpler stopping rules, on easy and hard text mixed.

    python bench/evidence/specdecpp.py              # what is left of five seeds, then rows and page
    python bench/evidence/specdecpp.py seeds=1 each=4 steps=50
    python bench/evidence/specdecpp.py worker=1 workers=2 # this process's share of the seeds

Text: answers to GSM8K, Python source, and copies (half a window of source repeated, to be gone on
with), a third each. The draft is three of the target's own layers, distilled on maths and source.
A seed is the sampling noise, the heads' weights and the order of their rows. Heads learn
from traces of the training side; every rule's threshold, and K, are chosen on the
tune part of the held-out side for each cost of a draft call; figures are of its report part. A
trace with a round at every position is replayed, which counts what the decoder would (exactly:
tests/decode/traces/test_replay.py), so that all costs c = t_draft / t_plain come from one trace, at
t_verify = t_plain. Then the decoder itself is timed on the report prompts, rules in turn, with
thresholds chosen at its own measured times. Rows and page: <out>/specdecpp.*
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftsmith.bench.evidence import specdecpp_page
from draftsmith.bench.evidence.specdecpp_timing import (
    decoded_rules,
    real_sizes,
    small_size,
    timed_rows,
)
from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run, write_table
from draftsmith.bench.speed.workers import launch
from draftsmith.command import parse, run_command
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.recorder import Columns, Recorder
from draftsmith.decode.engine.request import Completion, Counters
from draftsmith.decode.evaluate.metrics import block_efficiency
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.decode.prompts.splits import load_rows
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.traces import simulate_stops as replay
from draftsmith.decode.traces.record import check_mixing, mixed_rows
from draftsmith.decode.traces.simulate_stops import Rounds
from draftsmith.decode.traces.store import TraceWriter, read_traces
from draftsmith.decode.traces.tune_stops import by_costs, by_head, compared, rules
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.scorers import FOLDER, load_scorer, weights_mark
from draftsmith.models.tokenizer import load_tokenizer
from draftsmith.train.run.recipe import gsm8k

COSTS = (0.02, 0.05, 0.1, 0.2)
MOST = 4 << 30  # bytes of a trace
# Of the draft's text: rows of GSM8K; characters of a piece of source, of which each fifth is taken.
MATHS, PIECE, SOURCE_SHARE = 3000, 1500, 5
MIXING = 0.15  # of mixed rows, the paper's r
WINDOW = 96  # tokens of source that a copy is made of; a third of it is repeated
KINDS = ("gsm8k", "python", "copy")
# How each head learns, and from which trace: ours, and the paper's form at our rate and steps (with
# its own, made for 40,000 answers, it hardly leaves its beginning on so few).
HEADS: dict[str, tuple[str, ...]] = {
    "head": ("train", "recipe=specdecpp/gsm8k"),
    "head-paper": (
        *("mixed", "recipe=specdecpp/paper", "lr=2e-3", "steps=600", "warmup=20"),
        *("batch_size=1024", "dtype=float32", "eval_every=100"),
    ),
}


@dataclass
class Evidence:
    target: str = field(default_factory=lambda: gsm8k("target"))
    gsm8k: str = field(default_factory=lambda: gsm8k("data"))
    seeds: int = 5
    each: int = 24  # prompts of a kind in the tune and the report part
    learn: int = 100  # prompts of a kind that heads learn from
    K: int = 12  # the longest draft
    max_new_tokens: int = 96
    steps: int = 0  # of a head; 0: the recipe's
    timed: bool = True  # on a quiet machine
    timed_each: int = 12  # prompts of a kind that are timed
    worker: int = 0
    workers: int = 1
    draft_steps: int = 150
    trained: str = "runs/specdecpp"
    out: str = "docs/results"


def main(argv: list[str]) -> None:
    """Measure the seeds that aren't done, then write rows and page of all that are."""
    settings = parse(Evidence, argv)
    console = Console()
    need("target", settings.target)
    distilled(settings)
    for number in range(settings.worker, settings.seeds, settings.workers):
        seed = Seed(settings, number)
        seed.once("rows", seed.rows)
        if settings.timed:
            seed.once("timed", seed.timed)
    files = sorted(Path(settings.trained).glob("seed-*/*.json"))
    rows = [row for file in files for row in json.loads(file.read_text())]
    if not rows:
        return
    write_table(Path(settings.out), "specdecpp", rows, specdecpp_page.page(rows))
    console.print(f"written: {settings.out}/specdecpp.json, {settings.out}/specdecpp.md")


def distilled(settings: Evidence) -> None:
    """Train the draft, unless that was done: the target's layers 0, 3 and 7 to begin with, on rows
    of GSM8K and pieces of Python source, about as many tokens of each.
    """
    mix = Path(settings.trained) / "mix.jsonl"
    if (mix.parent / "draft" / "drafter").exists():
        return
    if not mix.exists():
        mix.parent.mkdir(parents=True, exist_ok=True)
        maths = load_rows(settings.gsm8k, "train")[:MATHS]
        rows = [{"question": row.prompt, "answer": row.completion} for row in maths]
        for row in load_rows("stdlib", "train"):
            text = row.completion
            rows += [{"text": text[at : at + PIECE]} for at in range(0, len(text), PIECE)]
        rows = [*rows[:MATHS], *rows[MATHS::SOURCE_SHARE]]
        mix.write_text("".join(json.dumps(row) + "\n" for row in rows))
    launch(
        *("distill", "recipe=gsm8k/distill", f"out={settings.trained}/draft", f"data={mix}"),
        *(f"target.path={settings.target}", "draft=", f"steps={settings.draft_steps}"),
        "draft={init: target, init_layers: [0, 3, 7], layers: 3, hidden: 384, head_dim: 64}",
        "draft={heads: 6, kv_heads: 3, intermediate: 1024}",
        *(f"heldout={settings.gsm8k}", "lr=3e-3", "warmup=20", "eval_every=100"),
    )


class Seed:
    """One seed's traces, heads and figures."""

    def __init__(self, settings: Evidence, seed: int) -> None:
        self.settings, self.seed = settings, seed
        self.folder = Path(settings.trained) / f"seed-{seed}"
        self.drafter = Path(settings.trained) / "draft" / "drafter"
        self.params = SamplingParams(
            1.0, max_new_tokens=settings.max_new_tokens, seed=seed, ignore_eos=True
        )

    def once(self, name: str, measure: Callable[[], list[dict[str, Any]]]) -> None:
        """Measure and keep rows, unless that was done before."""
        file = self.folder / f"{name}.json"
        if not file.exists():
            about = {
                "target": self.settings.target,
                "data": "gsm8k, python source, copies",
                "seed": self.seed,
                **about_run(),
            }
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps([row | about for row in measure()], indent=1))

    def rows(self) -> list[dict[str, Any]]:
        """What replays of the report part give, at every cost."""
        self.learn()
        heads = {name: self.head(name, *how) for name, how in HEADS.items()}
        parts = {part: self.rounds(part, heads) for part in ("tune", "report")}
        return [row for c in COSTS for row in self.replayed(parts, c)]

    def timed(self) -> list[dict[str, Any]]:
        """What the decoder takes, and what the head does."""
        folder = self.folder / "head" / "drafter"
        tuned_on = self.rounds("tune", {"head": folder / FOLDER})["head"]
        asked = self.prompts("report")
        prompts = [tokens for kind in KINDS for tokens in asked[kind][: self.settings.timed_each]]

        def open_decoder(**how: Any) -> Decoder:
            return self.decoder(drafter=None if how.pop("plain", False) else folder, **how)

        rows = timed_rows(
            open_decoder, decoded_rules(self.settings.K), tuned_on, prompts, self.params
        )
        rows.append(small_size(open_decoder))
        return rows + (real_sizes() if self.seed == 0 else [])

    def prompts(self, part: str) -> dict[str, list[list[int]]]:
        """Token ids by kind of text."""
        settings = self.settings
        count = settings.learn if part == "train" else settings.each
        tokenizer = load_tokenizer(settings.target)
        maths, python, source = (
            [
                prompt.tokens
                for prompt in load_prompts(
                    name, tokenizer, limit=count, prompt_tokens=length, split=part
                )
            ]
            for name, length in ((settings.gsm8k, 64), ("stdlib", 64), ("stdlib", WINDOW))
        )
        copies = [tokens + tokens[: WINDOW // 3] for tokens in source]
        return dict(zip(KINDS, (maths, python, copies), strict=True))

    def decoder(self, *, drafter: Path | None, dtype: str = "bfloat16", **how: Any) -> Decoder:
        """The target, with a drafter or for plain decoding."""
        folder = None if drafter is None else str(drafter)
        return Decoder.from_pretrained(self.settings.target, folder, dtype=dtype, **how)

    def learn(self) -> None:
        """The traces that heads learn from, both of the same answers: what was drafted in rounds of
        8, and the paper's mixed rows.
        """
        drafted, decoder, left, answers = self.decoded("train", K=8)
        mixed = TraceWriter(
            self.folder / "mixed", drafted.manifest["about"] | {"kind": "mixed"}, max_bytes=MOST
        )
        draft = check_mixing(decoder.drafter, self.params, MIXING)
        for answer in answers:
            number = left[answer.index]
            if number not in mixed.done:
                rows = mixed_rows(decoder.runner, draft, answer, number, self.params, MIXING)
                mixed.add(number, rows)
        drafted.close()
        mixed.close()

    def decoded(
        self, part: str, K: int, *, every: bool = False
    ) -> tuple[TraceWriter, Decoder, list[int], list[Completion]]:
        """Trace the prompts of a part, numbered kind by kind; those that were done are left out."""
        asked = self.prompts(part)
        tokens = [one for kind in KINDS for one in asked[kind]]

        def keep(place: int, columns: Columns) -> None:
            columns.pop("target_state")
            writer.add(left[place], columns)

        decoder = self.decoder(
            drafter=self.drafter, K=K, batch_size=8, same_shape=every, recorder=Recorder(keep)
        )
        about = {
            "kind": "decoder",
            "target": fingerprint(decoder.runner.model, decoder.tokenizer),
            "drafter": {"path": str(self.drafter), "mark": weights_mark(self.drafter)},
            "settings": {"K": K, "every": every, "rule": "coupled", "prompts": len(tokens)},
        }
        writer = TraceWriter(self.folder / part, about, max_bytes=MOST)
        left = [i for i in range(len(tokens)) if i not in writer.done]
        answers = decoder.generate([tokens[i] for i in left], self.params, left)
        return writer, decoder, left, answers

    def head(self, name: str, learns_from: str, *how: str) -> Path:
        """The folder of a trained head."""
        out = self.folder / name
        argv = [*how, f"seed={self.seed}", f"out={out}", f"reading.drafter={self.drafter}"]
        argv += [
            f"target.path={self.settings.target}",
            f"reading.traces=[{self.folder}/{learns_from}]",
        ]
        argv += [f"steps={self.settings.steps}"] if self.settings.steps else []
        made = out / "drafter" / FOLDER
        if not made.exists():
            launch("scorers", *argv)
        return made

    def rounds(self, part: str, heads: Mapping[str, Path]) -> dict[str, list[Rounds]]:
        """The rounds at every position of a part's answers, scored by each head."""
        writer, *_ = self.decoded(part, self.settings.K, every=True)
        writer.close()
        trace = read_traces(self.folder / part)
        return {
            name: replay.rounds_of(
                trace, replay.log_chances(load_scorer(folder, "acceptance").scorer, trace)
            )
            for name, folder in heads.items()
        }

    def replayed(self, parts: dict[str, dict[str, list[Rounds]]], c: float) -> list[dict[str, Any]]:
        """A row an arm at one cost of a draft call."""
        tune, report = parts["tune"], parts["report"]
        arms: dict[str, Any] = {
            name: (own, tune["head"], report["head"])
            for name, own in rules(self.settings.K).items()
        }
        for name, state in (("head-paper", "token"), ("head", "parent")):
            arms[name] = (by_head(state, self.settings.K), tune[name], report[name])
        options = by_costs("parent", self.settings.K, c, 1.0)
        arms["head-costs"] = (options, tune["head"], report["head"])
        rows, counters = compared(arms, c)
        for row in rows:
            row |= {"c": c, "prompts": 3 * self.settings.each}
            row["kinds"] = {
                kind: {"tau": block_efficiency(own), "speedup": replay.speedup(own, c)}
                for kind, own in split(counters[row["what"]]).items()
            }
        return rows


def split(counters: Sequence[Counters]) -> dict[str, Sequence[Counters]]:
    """By kind of text: equal shares in a row."""
    share = len(counters) // len(KINDS)
    return {kind: counters[i * share : (i + 1) * share] for i, kind in enumerate(KINDS)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_command(main, Evidence)
