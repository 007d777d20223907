"""Flat rows for docs/results: one an arm and temperature, and the page that is made from them."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.decode.report.figures import TEMPLATES
from draftsmith.printed import bracket, number

COPIED = (
    *("seed", "temperature", "alpha", "alpha_interval", "tau", "tau_interval"),
    *("coupled_acceptance", "rules", "tokens_per_s", "speedup", "speedup_interval"),
    *("ideal_speedup", "efficiency", "c", "mbsu", "loop_rate", "task", "agreement", "lossy"),
    *("identical", "identical_same_shape", "K", "N", "tree", "policy", "rule", "dtype", "threads"),
    *("batch", "n_prompts", "max_new_tokens", "seconds", "commit", "command", "versions"),
    "machine",
)
OF_POLICY = ("over", "ideal_speedup", "efficiency", "mbsu", "N", "rules")
PAIRED = ("T", "drafter", "tau, more by", "95%", "speed-up, more by", "its 95%")
HEAD = ("T", "drafter", "alpha", "tau", "speed-up", "tokens/s (plain)", "loop rate", "identical")


def row(what: str, report: dict[str, Any]) -> dict[str, Any]:
    """The row of one report; what: the arm."""
    head = {"what": what, "target": report["target"], "data": report["prompts"]}
    copied = {name: report[name] for name in COPIED}
    copied |= {"over": report["over"]} if report.get("over") else {}
    return head | copied


def rows_of(what: str, report: dict[str, Any]) -> list[dict[str, Any]]:
    """The row of a report, and beside a policy that rests one of drafting in every round."""
    found = [row(what, report)]
    if one := report.get("drafting"):
        own = {**found[0], **one, "what": f"{what}, K={one['K']}", "policy": "fixed"}
        own["tokens_per_s"] = report["tokens_per_s"] | {"speculative": one["tokens_per_s"]}
        found.append({key: value for key, value in own.items() if key not in OF_POLICY})
    return found


def publish(title: str, rows: list[dict[str, Any]], folder: Path, name: str = "results") -> None:
    """Write <name>.json and <name>.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / f"{name}.md").write_text(page(title, rows))


def page(title: str, rows: list[dict[str, Any]]) -> str:
    """Markdown, from the rows alone."""
    about = {"head": HEAD, "table": map(cells, rows), "unrepeatable": unrepeatable(rows)}
    about |= {"paired_head": PAIRED, "paired": differences(rows)}
    return TEMPLATES.get_template("results.md.jinja").render(title=title, rows=rows, **about)


def differences(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The paired differences of every two drafters that were run together, by PAIRED."""
    found = []
    for place, row in enumerate(rows):
        temperature = row["temperature"]
        before = {one["what"] for one in rows[:place] if one["temperature"] == temperature}
        for other, one in row.get("over", {}).items():
            if other in before:
                words = [f"{temperature:g}", f"{row['what']} over {other}"]
                for name in ("tau", "speedup"):
                    words += [f"{one[name]:+.2f}", bracket(one[f"{name}_interval"])]
                found.append(words)
    return found


def cells(row: dict[str, Any]) -> list[str]:
    """A row in words, in the order of HEAD."""
    speed, same = row["tokens_per_s"], row["identical"]
    verdict = "not compared"
    if row.get("lossy"):
        verdict = f"LOSSY {row['lossy']}, "
        if task := row["task"]:
            verdict += f"exact match {task['speculative']:.1%} (plain {task['plain']:.1%})"
        else:
            verdict += f"agreement {row['agreement']['share']:.3f}"
    elif same is not None:
        ties = f", {same['excused']} near-tie" if same["excused"] else ""
        verdict = f"{same['same']} of {same['total']}{ties}"
    between = (
        f"{number(row[name], digits)} {bracket(row[f'{name}_interval'], digits)}".rstrip()
        for name, digits in (("alpha", 3), ("tau", 2), ("speedup", 2))
    )
    tokens = f"{speed['speculative']:.0f} ({speed['plain']:.0f})"
    temperature, loops = f"{row['temperature']:g}", f"{row['loop_rate']:.0%}"
    return [temperature, row["what"], *between, tokens, loops, verdict]


def unrepeatable(rows: Sequence[dict[str, Any]]) -> str:
    """What a page says of the rows that their command doesn't make again; nothing of the others."""
    reasons = Counter(r["why"] for r in rows if not r.get("repeatable", True))
    counted = (f"{n} of {len(rows)} rows: {why}" for why, n in reasons.items())
    return "".join(f" Not repeatable, {words}." for words in counted)
