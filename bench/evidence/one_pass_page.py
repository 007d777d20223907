"""The page of docs/results/one-pass.json: tau by drafter and drafted nodes, from the rows alone."""

from typing import Any

from draftsmith.bench.evidence.head_page import Rows, by_depth, difference, taus
from draftsmith.bench.rows import markdown, source


def page(rows: Rows) -> str:
    """Markdown: tau by drafter and size of tree, what each costs, and ours against each other."""
    first = rows[0]
    kinds, trees = (list(dict.fromkeys(row[name] for row in rows)) for name in ("what", "tree"))
    lines = [
        "# One-pass drafters on one target",
        "",
        f"{source(rows)} Target {first['target']}, {first['n_prompts']} held-out prompts of "
        f"{first['data']}, {first['max_new_tokens']} new tokens, bf16; {first['steps']} steps each "
        "on the same answers. tau: tokens a target call, over all seeds; its interval is 95%, "
        "bootstrap over prompts; in brackets the smallest and largest seed. A chain has five "
        "tokens; trees are grown from six "
        "nodes a level with six children each, and cut to so many drafted nodes. Every drafter's "
        "children are ranked with the target's own noise.",
        "",
        *markdown(
            ("drafter", "seeds", "parameters", "training s", "draft ms a round", "c", "on"),
            costs(rows),
        ),
    ]
    for temperature in sorted({row["temperature"] for row in rows}):
        here = [row for row in rows if row["temperature"] == temperature]
        lines += ["", f"## Temperature {temperature:g}", ""]
        lines += markdown(("drafter", *trees), [[k, *taus(here, k, trees)] for k in kinds])
        lines += ["", "Acceptance of a chain by depth, given that all before was accepted:", ""]
        depths = max(len(r["acceptance_conditional"]) for r in here if r["tree"] == "chain")
        head = ("drafter", *(f"depth {depth}" for depth in range(1, depths + 1)))
        lines += markdown(head, [[k, *by_depth(here, k, depths)] for k in kinds])
        if "ours" in kinds:
            lines += ["", "Differences, paired over prompts:", ""]
            others = [(kind, tree) for kind in kinds if kind != "ours" for tree in trees]
            lines += [
                f"- {difference(here, f'ours - {kind}, {tree}', ('ours', tree), (kind, tree))}"
                for kind, tree in others
            ]
    return "\n".join(lines) + "\n"


def costs(rows: Rows) -> list[list[str]]:
    """Of each drafter: its parameters, what its training took, and its drafting."""
    found: list[list[str]] = []
    for kind in dict.fromkeys(row["what"] for row in rows):
        mine: list[dict[str, Any]] = [r for r in rows if r["what"] == kind and r["tree"] == "chain"]
        seconds = [row["train_seconds"] for row in mine if row["train_seconds"] is not None]
        drafting, c = min(row["draft_ms"] for row in mine), min(row["c"] for row in mine)
        # None of a run that was held up: its clock ran on.
        trained = f"{min(seconds):.0f} to {max(seconds):.0f}" if seconds else "-"
        seeds = ", ".join(str(row["seed"]) for row in mine if row["temperature"] == 0)
        found.append(
            [
                *(kind, seeds, f"{mine[0]['parameters']:,}", trained),
                *(f"{drafting:.2f}", f"{c:.3f}", mine[0]["machine"]),
            ]
        )
    return found
