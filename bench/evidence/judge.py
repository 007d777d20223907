"""Accuracy against tau when more is accepted than the rule accepts: a judge beside its baselines.

    python bench/evidence/judge.py                       # after recipe=judge/target and judge/draft
    python bench/evidence/judge.py seeds=1 questions=50 labelled=64

At temperature 0 every way to accept more is run at several settings over the same fresh problems of
`decode/prompts/arithmetic.py`, which nothing was trained on. Each seed is a judge of its own: other
questions to mine labels from, other weights to begin with, another order. What was run is kept in
<trained>; the rows and the page (`judge_page.py`) are <out>/judge.*
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.bench.evidence import judge_page
from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run
from draftsmith.command import parse, run_command
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.evaluate.answers import final_number
from draftsmith.decode.evaluate.metrics import block_efficiency, ratio_interval
from draftsmith.decode.prompts import arithmetic
from draftsmith.decode.prompts.prompts import prompt_ids
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.traces import judge_labels
from draftsmith.models.disk.read_lm import read_json
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.train import scorers

# The settings of each way, from strict to free.
SWEEPS: dict[str, Sequence[float]] = {
    "judge": (0.995, 0.99, 0.98, 0.95, 0.8, 0.65, 0.5, 0.3, 0.15, 0.05),
    "lenience": (0.5, 0.2, 0.1, 0.07, 0.05, 0.03, 0.01, 1e-3),
    "fuzzy": (0.03, 0.1, 0.15, 0.2, 0.23, 0.26, 0.3, 0.35, 0.55),
    "typical": (0.3, 0.1, 0.05, 0.03, 0.01, 3e-3, 3e-4),
}


@dataclass
class Bench:
    target: str = "runs/judge/target/model"
    drafter: str = "runs/judge/draft/drafter"
    seeds: int = 5
    labelled: int = 200  # questions that labels are mined from, a seed
    questions: int = 300
    K: int = 8
    max_new_tokens: int = 100  # the longest true answer has about 80
    batch_size: int = 150
    trained: str = "runs/judge/bench"
    out: str = "docs/results"
    threads: int = 1


def main(argv: list[str]) -> None:
    settings = parse(Bench, argv)
    need("judge-target", settings.target)
    need("judge-draft", settings.drafter)
    torch.set_num_threads(settings.threads)
    judges = [trained_judge(settings, seed) for seed in range(settings.seeds)]
    runner = Runs(settings)
    rows = [runner.row("lossless", None, 0, "")]
    for what, values in SWEEPS.items():
        for value in values:
            if what == "judge":
                for seed, folder in enumerate(judges):
                    how = f"judge:{folder},{value}"
                    figures = read_json(folder / "scorer.json")["figures"]
                    rows.append(runner.row(what, value, seed, how) | scored(figures))
            else:
                # Typical: delta = sqrt(eps), Medusa's advice.
                how = f"{value},{value**0.5:.4g}" if what == "typical" else f"{value}"
                rows.append(runner.row(what, value, 0, f"{what}:{how}"))
    judge_page.publish(rows, Path(settings.out))


def trained_judge(settings: Bench, seed: int) -> Path:
    """A seed's judge, mined and trained unless it was before."""
    folder = Path(settings.trained) / f"seed-{seed}"
    if not (folder / "run/done.json").exists():
        started = time.perf_counter()
        mined = judge_labels.Labels(
            target=settings.target,
            drafter=settings.drafter,
            data="arithmetic",
            out=str(folder / "labels"),
            limit=settings.labelled,
            seed=seed,
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.labelled,
            dtype="float32",
        )
        print(judge_labels.label(mined), f"{time.perf_counter() - started:.0f} s", flush=True)
        line = ["recipe=judge/arithmetic", f"out={folder / 'run'}", f"seed={seed}", "processes=1"]
        line += [f"target.path={settings.target}", f"reading.traces=[{folder / 'labels'}]"]
        scorers.main(line)
    return folder / "run/judge"


def scored(figures: dict[str, Any]) -> dict[str, Any]:
    """How well a judge tells labels of prompts that it didn't train on."""
    return {name: figures[name] for name in ("auc", "brier", "brier_constant")}


class Runs:
    """One pair and its questions, loaded once; what was run is kept."""

    def __init__(self, settings: Bench) -> None:
        self.settings = settings
        spec = TargetSpec(settings.target, dtype="float32")
        self.target, self.tokenizer = load_target(spec, "cpu")
        self.drafter = load_drafter(settings.drafter, self.target, self.tokenizer)
        known = {row.prompt for row in arithmetic.arithmetic_rows()}
        fresh = arithmetic.arithmetic_rows(arithmetic.ROWS, settings.questions + 20)
        asked = [row for row in fresh if row.prompt not in known][: settings.questions]
        self.prompts = [prompt_ids(row, self.tokenizer) for row in asked]
        self.answers = [final_number(row.completion) for row in asked]

    def row(self, what: str, value: float | None, seed: int, lossy: str) -> dict[str, Any]:
        """The row of one run, made unless it was before."""
        name = f"{what}-{value}-{seed}.json".replace("None-", "")
        file = Path(self.settings.trained) / "rows" / name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(self.run(what, value, seed, lossy)))
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def run(self, what: str, value: float | None, seed: int, lossy: str) -> dict[str, Any]:
        settings, started = self.settings, time.perf_counter()
        options: dict[str, Any] = {"K": settings.K, "batch_size": settings.batch_size}
        if lossy:
            options |= {"lossy": lossy, "allow_lossy": True}
        decoder = Decoder(self.target, self.tokenizer, self.drafter, **options)
        params = SamplingParams(max_new_tokens=settings.max_new_tokens)
        done = decoder.generate(self.prompts, params)
        right = [
            float(made.finish_reason == "stop" and final_number(made.text) == answer)
            for made, answer in zip(done, self.answers, strict=True)
        ]
        counters = [made.counters for made in done]
        emitted, rounds = [c.emitted for c in counters], [c.rounds for c in counters]
        tau, accuracy = block_efficiency(counters), sum(right) / len(right)
        seconds = time.perf_counter() - started
        print(f"{lossy or what}: tau {tau:.3f}, right {accuracy:.3f}, {seconds:.0f} s", flush=True)
        return {
            "what": what,
            "setting": value,
            "lossy": lossy,
            "target": settings.target,
            "drafter": settings.drafter,
            "data": "arithmetic, fresh problems",
            "seed": seed,
            "temperature": 0.0,
            "K": settings.K,
            "n_prompts": len(right),
            "accuracy": accuracy,
            "accuracy_interval": ratio_interval(right, [1.0] * len(right)),
            "tau": tau,
            "tau_interval": ratio_interval(emitted, rounds),
            "each": {
                "right": "".join(str(int(one)) for one in right),
                "emitted": emitted,
                "rounds": rounds,
            },
            "seconds": seconds,
            **about_run(),
        }


if __name__ == "__main__":
    run_command(main, Bench)
