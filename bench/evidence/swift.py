"""How near SWIFT, which searches while it decodes, comes to the sets of the offline search.

    python bench/evidence/swift.py

Offline: the set of the same size that is worth most on answers to prompts of the tune part
(`decode/predict/best_layers.py`). Online: a fresh drafter=swift decodes other prompts of that part
for so many rounds, with each batch size and seed. Both sets then decode prompts of the report part:
MBSU = tau / (1 + K c'). agreement: of the part alone, whose keys and values are its own; kept: the
share of first drafts that were kept, made with the target's own of the committed text. Rows and
page: <out>/swift.*
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run, markdown, source, write_table
from draftsmith.command import parse, run_command
from draftsmith.decode.draft_lms.lm import weights_read
from draftsmith.decode.drafters.load import load_decoded
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.evaluate.metrics import acceptance_by_position, block_efficiency
from draftsmith.decode.predict.best_layers import Units, agreement, best_sets
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.untrained.own_layers import (
    OwnLayersDrafter,
    joined,
    part_bytes,
    skip_name,
    worth,
)
from draftsmith.decode.untrained.swift import SwiftDrafter
from draftsmith.models.target import TargetSpec
from draftsmith.train.run.recipe import gsm8k

HEAD = ("arm", "batch", "seed", "trials", "skip", "agreement", "kept", "tau", "mbsu", "of_best")


@dataclass(kw_only=True)
class Searching:
    target: str = field(default_factory=lambda: gsm8k("target"))
    data: str = field(default_factory=lambda: gsm8k("data"))
    K: int = 4
    share: float = 0.45
    rounds: int = 300
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4])
    seeds: list[int] = field(default_factory=lambda: [0, 1])
    temperature: float = 0.0
    answers: int = 10  # that the offline search is judged on
    reported: int = 16
    max_new_tokens: int = 64
    swaps: int = 32
    threads: int = 1
    out: str = "docs/results"


class Bench:
    def __init__(self, settings: Searching) -> None:
        need("target", settings.target)
        self.settings = settings
        spec = TargetSpec(settings.target, dtype="float32")
        self.model, self.tokenizer = load_decoded(spec, "cpu")
        self.params = SamplingParams(settings.temperature, max_new_tokens=settings.max_new_tokens)
        self.plain = Decoder(self.model, self.tokenizer, batch_size=8)
        self.tune, self.report = (
            [p.tokens for p in load_prompts(settings.data, self.tokenizer, limit=None, split=part)]
            for part in ("tune", "report")
        )
        made = self.plain.generate(self.tune[: settings.answers], self.params)
        self.answers = [one for one in made if len(one.tokens) > 1]
        self.known: dict[str, float] = {}

    def cost(self, chosen: Units) -> float:
        depth = self.model.config.num_hidden_layers
        return part_bytes(self.model, depth, joined(chosen)) / weights_read(self.model)

    def value(self, chosen: Units) -> float:
        name = skip_name(joined(chosen))
        if name not in self.known:
            part = self.plain.runner.part(self.model.config.num_hidden_layers, joined(chosen))
            self.known[name] = agreement(part, self.answers, self.params, len(self.answers))
        return worth(self.known[name], self.settings.K, self.cost(chosen))

    def row(self, chosen: Units, **about: Any) -> dict[str, Any]:
        """What a set comes to on the report part."""
        settings, name = self.settings, skip_name(joined(chosen))
        foretold = self.value(chosen)
        drafter = OwnLayersDrafter.named("skip", name, self.model, self.plain.vocab_size)
        decoder = Decoder(self.model, self.tokenizer, drafter, K=settings.K, batch_size=8)
        made = decoder.generate(self.report[: settings.reported], self.params)
        counters = [one.counters for one in made]
        tau, c_bytes = block_efficiency(counters), self.cost(chosen)
        found = {"skip": name, "agreement": self.known[name], "foretold": foretold}
        found |= {"kept": acceptance_by_position(counters)[0][0], "tau": tau, "c_bytes": c_bytes}
        return about | found | {"mbsu": tau / (1 + settings.K * c_bytes)}

    def online(self, batch: int, seed: int) -> SwiftDrafter:
        """A drafter after so many rounds of a batch."""
        own = Counting(self.model, self.plain.vocab_size, self.settings.share)
        own.rng.seed(seed)
        decoder = Decoder(self.model, self.tokenizer, own, K=self.settings.K, batch_size=batch)
        prompts = self.tune[self.settings.answers :]
        for _ in decoder.stream(prompts, self.params):
            if own.rounds >= self.settings.rounds:
                return own
        raise ValueError(f"data: got answers for {own.rounds} rounds, expected more; ask for fewer")


class Counting(SwiftDrafter):
    rounds = trials = 0

    def between(self, request: Any, race: Any) -> bool:
        self.rounds += 1
        self.trials += self.wait <= 1
        return super().between(request, race)


def main(argv: list[str]) -> None:
    settings = parse(Searching, argv)
    torch.set_num_threads(settings.threads)
    bench = Bench(settings)
    first = SwiftDrafter(bench.model, bench.plain.vocab_size, settings.share)
    search = best_sets(
        bench.value, first.units, len(first.chosen), settings.swaps, random.Random(0)
    )
    *_, best = search
    rows = [bench.row(best, arm="offline"), bench.row(first.chosen, arm="online, at its start")]
    for batch in settings.batch_sizes:
        for seed in settings.seeds:
            own = bench.online(batch, seed)
            about = {"arm": "online", "batch": batch, "seed": seed, "trials": own.trials}
            rows.append(bench.row(own.chosen, **about, rounds=own.rounds))
            print(rows[-1], flush=True)
    rows = [row | {"of_best": row["mbsu"] / rows[0]["mbsu"]} for row in rows]
    rows = [row | about_run() for row in rows]
    write_table(Path(settings.out), "swift", rows, page(settings, rows))
    print(page(settings, rows))


def page(settings: Searching, rows: list[dict[str, Any]]) -> str:
    """Markdown: a line for each set."""
    words = (
        f"{source(rows)} Sets of the same number of halves; online ones after {settings.rounds} "
        f"rounds of other prompts. {settings.reported} held-out prompts, K = {settings.K}, "
        f"temperature {settings.temperature:g}, fp32. MBSU: tau / (1 + K bytes read by a draft "
        "call / bytes of a plain step)."
    )
    shown = [[row.get(name, "") for name in HEAD] for row in rows]
    cells = [[f"{x:.3f}" if isinstance(x, float) else str(x) for x in row] for row in shown]
    return "\n".join(["# How near SWIFT comes", "", words, "", *markdown(HEAD, cells), ""])


if __name__ == "__main__":
    run_command(main, Searching)
