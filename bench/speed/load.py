"""Tokens a second of decoding by how many rows decode at a time: plain, every fixed K, `auto`.

    python bench/speed/load.py                        # the one-pass table's drafter of ours
    python bench/speed/load.py sizes=1,8 temperatures=0 groups=2 out=runs/bench/try
    python bench/speed/load.py on=twin target=runs/twin/target drafter=runs/twin/drafter fixed=4

Every arm decodes each group of prompts, in an order by lot; what counts is the decoding alone,
prefills excluded, by the thread's own clock where there is one thread, and answers are as long as
they may be; beside it stands what comes out with prefills. ratio: an arm's rate over plain
decoding's, the mean over groups, with a 95% interval over groups (bootstrap). `auto` learns as it
goes; one group before the first one counted is its warm-up, as everybody's. Plain decoding takes
part twice, which tells what of an interval is the machine's. At temperature 0 transformers'
`generate` on a padded batch stands beside. Rows, page and picture, after each size:
<out>/load.*, where rows of other targets, sizes and temperatures stay.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import logging

from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run, beside, interval, markdown, source, write_table
from draftsmith.bench.speed.arms import (
    Arm,
    Turn,
    decode_by,
    decode_rate,
    generate,
    take_turns,
    tau,
)
from draftsmith.command import parse, run_command
from draftsmith.decode.drafters.load import load_decoded, load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.decode.report.charts import Trend, drawing, scatter
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.target import TargetSpec
from draftsmith.train.run.recipe import gsm8k


@dataclass
class LoadBench:
    on: str = "target-15m"  # what the target is called
    target: str = field(default_factory=lambda: gsm8k("target"))
    drafter: str = "runs/one-pass/ours-0/drafter"
    data: str = field(default_factory=lambda: gsm8k("data"))
    sizes: str = "1,2,4,8,16,32,64"  # rows that decode at a time
    temperatures: str = "0,0.7,1"
    fixed: str = "1,2,4"  # K of the arms that never change it
    tree: str = "chain"  # of which auto chooses a part
    K: int = 5
    policies: str = "auto"  # budget beside it, or another one
    groups: int = 4  # of as many prompts as rows
    prompts: int = 64  # in all at least: of few rows there are more groups
    max_new_tokens: int = 64
    dtype: str = "bfloat16"
    threads: int = 1
    out: str = "runs/bench"


def main(argv: list[str]) -> None:
    settings = parse(LoadBench, argv)
    need("ours-alone", settings.drafter)
    decode_by(settings.threads)
    logging.set_verbosity_error()
    target, tokenizer = load_decoded(TargetSpec(settings.target, dtype=settings.dtype), "cpu")
    texts = [prompt.tokens for prompt in load_prompts(settings.data, tokenizer, limit=300)]
    how = (
        f"{settings.dtype}, {settings.threads} thread(s), {settings.max_new_tokens} new tokens, "
        f"{settings.groups} groups or more; {Path(settings.drafter).parent.name} drafts"
    )
    about, out = about_run() | {"on": settings.on, "how": how}, Path(settings.out)
    for size in map(int, settings.sizes.split(",")):
        starts = range(0, max(settings.groups, settings.prompts // size) * size, size)
        groups = [[texts[(at + i) % len(texts)] for i in range(size)] for at in starts]

        def ours(name: str | None = settings.drafter, size: int = size, **how: Any) -> Decoder:
            return Decoder(
                target, tokenizer, load_drafter(name, target, tokenizer), batch_size=size, **how
            )

        rows: list[dict[str, Any]] = []
        arms = {"plain": ours(None), "plain again": ours(None)}
        arms |= {f"K = {K}": ours(K=int(K)) for K in settings.fixed.split(",")}
        for name in settings.policies.split(","):
            arms[name] = ours(policy=name, tree=settings.tree, K=settings.K)
        for T in map(float, settings.temperatures.split(",")):
            params = SamplingParams(T, max_new_tokens=settings.max_new_tokens, ignore_eos=True)
            called: dict[str, Arm] = {
                name: partial(decoder.generate, params=params) for name, decoder in arms.items()
            }
            if T == 0:
                called["generate"] = generate(target, settings.max_new_tokens)
            turns = take_turns(f"{size} rows, temperature {T:g}", called, groups)
            rows += [about | row(size, T, what, turns[what], turns["plain"]) for what in called]
        rows = beside(out / "load.json", rows, "on", "batch", "temperature")
        rows.sort(key=lambda one: (one["on"], one["temperature"], one["batch"]))
        write_table(out, "load", rows, page(rows), picture(rows))
    print(page(rows))


def row(size: int, T: float, what: str, turns: list[Turn], plain: list[Turn]) -> dict[str, Any]:
    """An arm's rate, and its ratio to plain decoding's, group by group."""
    rate = whole_rate if what == "generate" else decode_rate
    pairs = [([a], [b]) for a, b in zip(turns, plain, strict=True)]
    ratios = [rate(a) / rate(b) for a, b in pairs]
    tokens = {"ratio": float(np.mean(ratios)), "interval": interval(ratios), "rate": rate(turns)}
    tokens |= {"whole": float(np.mean([whole_rate(a) / whole_rate(b) for a, b in pairs]))}
    more = {"peer": "transformers"} if what == "generate" else {"tau": tau(turns)}
    return {"what": what, "batch": size, "temperature": T} | tokens | more


def whole_rate(turns: list[Turn]) -> float:
    """Prefills included, which a peer's call doesn't tell apart."""
    return sum(turn.rate * turn.seconds for turn in turns) / sum(turn.seconds for turn in turns)


def parts(rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The rows of each target and temperature, and their title."""
    for on, T in dict.fromkeys((one["on"], one["temperature"]) for one in rows):
        here = [one for one in rows if (one["on"], one["temperature"]) == (on, T)]
        yield f"{on}, temperature {T:g}", here


def cell(row: dict[str, Any]) -> str:
    if row["what"] == "plain":
        return f"{row['rate']:.0f}"
    shown = "{:.2f} ({:.2f} to {:.2f})".format(row["ratio"], *row["interval"])
    return f"{shown}; {row['whole']:.2f}" if "whole" in row and "peer" not in row else shown


def page(rows: list[dict[str, Any]]) -> str:
    """Markdown: a table a target and temperature, a row a batch size, a column an arm."""
    hows = dict.fromkeys(f"{one['on']}: {one['how']}." for one in rows)
    lines = ["# Tokens a second by load", "", " ".join([source(rows), *hows]), ""]
    lines += [
        "Ratio to plain decoding of the same rows, with its 95% interval over groups; under plain, "
        "its tokens a second. `generate` is transformers', padded, prefills included on both "
        "sides; of ours that is the figure after a semicolon, of rows that have it."
    ]
    for title, here in parts(rows):
        whats = list(dict.fromkeys(one["what"] for one in here))
        lines += ["", f"## {title.capitalize()}", ""]
        body = []
        for size in dict.fromkeys(one["batch"] for one in here):
            found = {one["what"]: one for one in here if one["batch"] == size}
            body.append([str(size), *(cell(found[what]) for what in whats)])
        lines += markdown(("rows", *whats), body)
    return "\n".join([*lines, "", "![tokens a second by rows](load.svg)", ""])


def picture(rows: list[dict[str, Any]]) -> str:
    """Tokens a second over plain decoding's by rows, a chart a target and temperature."""
    charts = []
    for title, every in parts(rows):
        here, trends = [one for one in every if one["what"] != "plain"], []
        for css, what in zip(
            ("soft", "b", "c", "d", "a"), dict.fromkeys(one["what"] for one in here), strict=False
        ):
            points = [(float(r["batch"]), r["ratio"]) for r in here if r["what"] == what]
            trends.append(Trend(what, css, points, [], points))
        words = {"x_label": "rows that decode at a time", "y_label": "over plain decoding"}
        charts.append(scatter(title, trends, **words))
    return drawing(charts)


if __name__ == "__main__":
    run_command(main, LoadBench)
