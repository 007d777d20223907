"""How the time of a forward grows with tokens a row (N), batch and context.

    python bench/speed/cost.py target=runs/quickstart/target/model \\
        draft=runs/quickstart/distill/drafter

As it should be: flat while reading the weights is what takes the time, then at most proportional,
so that no doubling of a size much more than doubles the time; what is copied or masked for a whole
pool would show here. Times are medians of isolated forwards, LM head included; on CUDA of replayed
graphs. `target=8B draft=EAGLE`: random models of those shapes. Rows, page and picture go to
docs/results/cost.*
"""

import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import lower, publish
from draftsmith.bench.speed import device
from draftsmith.command import parse, run_command
from draftsmith.decode.forward.kv import context_of
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.policies.timing import forward_call, median_times
from draftsmith.decode.report.charts import Series, columns, drawing
from draftsmith.models.draft_lm import load_draft

BASE = {"length": 1, "batch": 1, "context": 256}
AXES = {
    "length": ("N", [1, 2, 4, 8, 16, 32, 64]),
    "batch": ("batch", [1, 2, 4, 8, 16, 32, 64]),
    "context": ("context", [128, 256, 512, 1024, 2048, 4096, 8192]),
}
SHAPES = {"8B": device.LLAMA_8B, "EAGLE": device.EAGLE, "toy": device.TOY}


@dataclass
class Cost:
    target: str = "runs/quickstart/target/model"
    draft: str = "runs/quickstart/distill/drafter"
    device: str = "cpu"
    dtype: str = "bfloat16"
    threads: int = 1
    repeats: int = 50
    out: str = "docs/results"


def main(argv: list[str]) -> None:
    settings = parse(Cost, argv)
    torch.set_num_threads(settings.threads)
    rows = []
    for role, name in (("target", settings.target), ("draft", settings.draft)):
        if name not in SHAPES:
            need("quickstart-runs", name)
        if name in SHAPES:
            model = device.counting_lm(SHAPES[name], settings.device)
        else:
            model = load_draft(name, settings.dtype).eval().requires_grad_(False)
            model.to(settings.device)
        runner = Runner(model, model.config.vocab_size)
        if settings.device == "cuda":
            runner.compile()  # as in rounds
        for axis in track(AXES, description=f"{role} {name}", transient=True):
            rows.append({"target": name, **sweep(runner, role, axis, settings)})
    pair = (
        f"{role} {name} in {'bfloat16' if name in SHAPES else settings.dtype}"
        for role, name in (("target", settings.target), ("draft", settings.draft))
    )
    about = (
        f"Models: {', '.join(pair)}; a line through the times of forwards of N tokens a "
        f"row, else N = 1, batch 1, {BASE['context']} tokens of context. A pair is a doubling "
        "of the size, ours the median growth in one: as it should be where no ratio is far below 1."
    )
    publish("cost", rows, Path(settings.out), about=about, picture=picture(rows))


def sweep(runner: Runner, role: str, axis: str, settings: Cost) -> dict[str, Any]:
    """Median seconds at each size, and base + slope * size through them, by least squares."""
    sizes = [size for size in AXES[axis][1] if size < context_of(runner.model)]
    calls = {
        str(size): device.graphed(forward_call(runner, **{**BASE, axis: size}), settings.device)
        for size in sizes
    }
    seconds = list(median_times(calls, runner.device, settings.repeats).values())
    slope, base = statistics.linear_regression(sizes, seconds)
    line = f"{1e3 * base:.3g} ms + {1e6 * slope:.3g} us each"
    what = f"{role}, {AXES[axis][0]} {sizes[0]}-{sizes[-1]}: {line}"
    growth = [b / a for a, b in pairwise(seconds)]
    found = lower(what, "proportional", growth, [2.0] * len(growth), "times a doubling")
    return found | {"axis": axis, "size": sizes, "times": seconds, "base": base, "slope": slope}


def picture(rows: list[dict[str, Any]]) -> str:
    """Three panels: time against N, batch and context, of target and draft."""
    charts = []
    for axis, (words, _) in AXES.items():
        pair = [r for r in rows if r["axis"] == axis]
        series = [
            Series(name, css, ms, "{:.3g}".format)
            for r, name, css in zip(pair, ("target", "draft"), "ab", strict=True)
            for ms in [[1e3 * s for s in r["times"]]]
        ]
        places = [str(size) for size in pair[0]["size"]]
        title = f"Time of a forward against {words}"
        charts.append(columns(title, places, series, x_label=words, y_label="ms a forward"))
    return drawing(charts, [("a", "target"), ("b", "draft")])


if __name__ == "__main__":
    run_command(main, Cost)
