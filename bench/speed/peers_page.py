"""The page and picture of peers.py, from its rows alone."""

from collections.abc import Sequence
from typing import Any

from draftsmith.bench.rows import markdown, source
from draftsmith.decode.report.charts import LyingBar, drawing, lanes

HEAD = ("what", "peer", "ratio", "95%", "ours", "theirs", "K", "tau", "kept", "same answers")


def both(row: dict[str, Any], name: str, form: str) -> str:
    """Ours and theirs; a dash for what isn't told."""
    found = [row.get(f"{side}_{name}") for side in ("ours", "theirs")]
    words = ["-" if one in (None, "") else format(one, form) for one in found]
    return "" if words == ["-", "-"] else " / ".join(words)


def cells(row: dict[str, Any]) -> list[str]:
    """A row in words, by HEAD."""
    form = ".2f" if row["what"] == "efficiency" else ".1f"
    spread = "{:.2f} to {:.2f}".format(*row["interval"])
    words = [row["what"], row["peer"], f"{row['ratio']:.2f}", spread]
    words += [format(row[side], form) for side in ("ours", "theirs")]
    words += [both(row, "K", ""), both(row, "tau", ".2f"), both(row, "kept", ".2f")]
    return [*words, f"{row['same']:.0%}" if "same" in row else ""]


def accepted(row: dict[str, Any]) -> str:
    """A sentence on what is accepted of equal drafts."""
    spread = "{:.3f} to {:.3f}".format(*row["interval"])
    return (
        f"Of drafted tokens at K = {row['ours_K']}, {row['dtype']}, we accept {row['ours']:.3f}, "
        f"the {row['peer']} {row['theirs']:.3f}: {row['ratio']:.3f} of it ({spread} over prompts; "
        f"{row['machine']})."
    )


def title(row: dict[str, Any]) -> str:
    name = {"own": "The pair itself", "twin": "Its costly twin"}.get(row["pair"], row["pair"])
    threads = "one thread" if row["threads"] == 1 else f"{row['threads']} threads"
    return f"{name}, {row['parameters']}, {threads}, {row['machine']}"


def groups(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [r for r in rows if title(r) == name] for name in dict.fromkeys(map(title, rows))}


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a table a pair and number of threads."""
    first = rows[0]
    lines = ["# Beside other engines", "", f"{source(rows)}", ""]
    lines += [
        f"Tokens a second of decoding alone, one prompt at a time, greedy, {first['dtype']}, "
        f"{first['prompts']} prompts; ratio: ours over theirs, mean over prompts. K, tau (tokens a "
        "pass of the target) and kept (share of drafted tokens): ours / theirs. Same answers: of "
        "the peer's, those equal to our plain decoding's, token by token. `efficiency` is our "
        "speed-up beside tau t_plain / (t_verify + K t_draft) of isolated forwards.",
    ]
    for row in rows:
        if row["what"] == "accepted":
            lines += ["", accepted(row)]
    rows = [row for row in rows if row["what"] != "accepted"]
    for name, found in groups(rows).items():
        lines += ["", f"## {name}", "", *markdown(HEAD, [cells(row) for row in found])]
    return "\n".join([*lines, "", "![tokens a second](peers.svg)", ""])


def picture(rows: Sequence[dict[str, Any]]) -> str:
    """Tokens a second of every arm, a chart a group."""
    charts = []
    for name, found in groups(rows).items():
        speeds = {}
        for row in found:
            if row["what"] not in ("accepted", "efficiency"):
                speeds[f"ours, {row['what']}"] = row["ours"]
                speeds[row["peer"] if row["peer"] == "ours, plain" else full(row)] = row["theirs"]
        bars = [
            LyingBar(arm, [("a" if arm.startswith("ours") else "d", speed, "")], f"{speed:.0f}")
            for arm, speed in sorted(speeds.items(), key=lambda one: -one[1])
        ]
        charts.append(lanes(name, bars, x_label="tokens/s of decoding"))
    return drawing(charts, [("a", "ours"), ("d", "peers")])


def full(row: dict[str, Any]) -> str:
    return f"{row['peer']}, {row['what']}"
