"""How far `draftsmith predict` is off: its speed-ups beside those of the committed tables.

    python bench/evidence/predicted.py              # of docs/results; trains and decodes nothing

tau and K are the measured ones, so that what is judged is how long rounds take: as `compare` timed
them before it trained, with random weights (`foretold`), or as `evaluate` timed its passes apart
(`compare-twin`); else by the model of time, with the shapes of the recipes, on MACHINES' cpus (of
tables that are older than their constants: as it was). Of rows with an alpha, tau is also predicted
from that. Rows that miss by more than 15% are listed, all of them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from transformers import LlamaConfig

from draftsmith.command import parse, run_command
from draftsmith.decode.policies.foretold import extended, taus
from draftsmith.decode.predict.draft_sizes import Draft, shape_of
from draftsmith.decode.predict.machines import MACHINES, Machine
from draftsmith.decode.predict.predict import kinds_of, speedup
from draftsmith.printed import number, print_table, times_as
from draftsmith.train.run.recipe import RECIPES

MISS = 0.15
# What the older tables were measured on: the same machine, before its layers and heads ran in C++.
THEN = Machine(16, 0.5, 20, 245, 160, reached=0.22, overlaps=False)
VOCAB, CONTEXT = 4096, 128
LOOKED_UP = ("ngram", "suffix")
# A table's rows: the pair's recipes, and what predict calls what it measured.
PAIRS = {
    "quickstart": ("quickstart", {"before": "draft", "after": "draft", "ngram": "ngram"}),
    "gsm8k": ("gsm8k", {"before": "draft", "after": "draft", "ngram": "ngram"}),
    "trees": ("quickstart", {}),  # all of its rows are of the draft
    "own-layers": ("gsm8k", {"exit:2": "exit", "exit:6": "exit"}),
    "load": ("gsm8k", {f"K = {K}": "block" for K in (1, 2, 4)}),
}
FORETOLD = ("compare", "compare-gsm8k", "compare-avx2")  # which say what was foretold
APART = "compare-twin"
TABLES = (*PAIRS, *FORETOLD, APART)
MEASURED = ("quickstart", "load")  # by what MACHINES have constants of
TWIN = {"hidden": 1536, "intermediate": 5120, "layers": 16, "heads": 24, "kv_heads": 12}


@dataclass
class Judging:
    results: str = "docs/results"


class Judged(NamedTuple):
    """A measured row, and what is predicted of it; tau: foretold by its alpha, where it has one."""

    table: str
    row: dict[str, Any]
    speedup: float
    tau: float | None

    @property
    def error(self) -> float:
        return self.speedup / measured(self.row) - 1


def main(argv: list[str]) -> None:
    settings = parse(Judging, argv)
    found = [one for table in TABLES for one in judged(Path(settings.results), table)]
    head = ["table", "rows", "median error", "within 15%", "mean, signed", "tau by alpha, mean"]
    body = []
    for table in TABLES:
        rows = [one for one in found if one.table == table]
        errors = sorted(abs(one.error) for one in rows)
        taus = [abs(one.tau / one.row["tau"] - 1) for one in rows if one.tau]
        close = sum(error <= MISS for error in errors)
        body.append([table, str(len(rows)), f"{errors[len(errors) // 2]:.0%}"])
        body[-1] += [f"{close} of {len(rows)}", f"{sum(o.error for o in rows) / len(rows):+.0%}"]
        body[-1].append(f"{sum(taus) / len(taus):.0%}" if taus else number(None))
    print_table(head, body, head[:1])
    missed = [one for one in found if abs(one.error) > MISS]
    print_table(
        ["table", "what", "T", "rows", "K", "tau", "measured", "predicted", "off"],
        [cells(one) for one in missed],
        ["table", "what"],
        title=f"off by more than {MISS:.0%}: {len(missed)} of {len(found)}",
    )


def judged(results: Path, table: str) -> Iterator[Judged]:
    """The rows of a table of which something was foretold, or whose kind is known."""
    rows = results / f"{table}.json"
    if not rows.is_file():
        raise ValueError(
            f"got no {rows}; run first: make reproduce TABLE={table} (or results=PATH)"
        )
    for row in json.loads(rows.read_text()):
        what = row["what"].split(",")[0]
        told, K = row.get("ideal_speedup" if table == APART else "foretold"), row.get("K")
        if table in PAIRS and row.get("on") != "twin":  # of which MACHINES' cpu knows too little
            told, K = modelled(table, row)
        if told is None:
            continue
        chain = row.get("tree", "chain") == "chain" and what not in LOOKED_UP
        alpha = row.get("alpha") if chain else None
        tau = float(taus(extended([alpha], max(1, round(K))))[-1]) if alpha else None
        yield Judged(table, row, told, tau)


def modelled(table: str, row: dict[str, Any]) -> tuple[float | None, float]:
    """A row's speed-up by the model of time, and K; None where its kind isn't known."""
    pair, kinds = PAIRS[table]
    kind = kinds.get(row["what"], None if kinds else "draft")
    if kind is None:
        return None, 0
    target, draft = (shape_by(f"{pair}/{name}") for name in ("target", "draft"))
    if row.get("on", "").startswith("twin"):
        target = shape(TWIN)
    exits = int(row["what"].split(",")[0].partition(":")[2] or 1) if kind == "exit" else 1
    # Policies and look-ups draft fewer levels than they may: K is their mean.
    chain = row.get("tree", "chain") == "chain" or kind in LOOKED_UP  # K: nodes of what there is
    counts = [row[key] for key in (("K", "levels") if chain else ("levels", "K")) if row.get(key)]
    K = counts[0] if counts else int(row["what"].removeprefix("K = "))
    machine, how = THEN, kinds_of(target, VOCAB, draft.work, exits)[kind]
    if table in MEASURED:
        intel = "cpu-amx" if "amx" in row["machine"] else "cpu-intel"
        machine = MACHINES[intel if "Intel" in row["machine"] else "cpu"]
    way = (K, 0 if chain else nodes_of(row) - 1, row["tau"])
    return speedup((machine, target, how), way, row.get("batch") or 1, CONTEXT), K


@cache
def shape_by(recipe: str) -> Draft:
    """The model that a recipe makes."""
    return shape(yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())["model"])


def shape(sizes: dict[str, Any]) -> Draft:
    """Of a Llama of these, called as in recipes."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        tie_word_embeddings=True,
    )
    return shape_of(config)


def nodes_of(row: dict[str, Any]) -> int:
    """Of a tree, its root included."""
    return int(row["N"] if row.get("N") else row["tree"].split(",")[2])


def measured(row: dict[str, Any]) -> float:
    return row["ratio"] if "ratio" in row else row["speedup"]


def cells(one: Judged) -> list[str]:
    row = one.row
    words = [one.table, f"{row['what']} {row.get('tree') or ''}".strip()]
    words += [f"{row['temperature']:g}", str(row.get("batch") or 1), f"{row.get('K') or 0:.3g}"]
    words += [number(row["tau"]), times_as(measured(row)), times_as(one.speedup)]
    return [*words, f"{one.error:+.0%}"]


if __name__ == "__main__":
    run_command(main, Judging)
