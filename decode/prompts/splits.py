"""Which rows are trained on, which are held out, and which of those a figure may be tuned on.

Held out, everywhere and always the same: of GSM8K the last 300 rows of the file; of anything else
about 5 % (of fewer than 1,200 rows 60, or a fifth), chosen by a hash of the file's path (standard
library) or of the row's text, so that equal rows fall on one side.
"""

import hashlib
from collections.abc import Sequence
from itertools import chain

from draftsmith.command import check_one_of
from draftsmith.decode.prompts.rows import Row
from draftsmith.decode.prompts.sources import read_source

HELD_OUT_PARTS = ("tune", "report")  # of the held-out side
SPLITS = ("train", "heldout", *HELD_OUT_PARTS, "all")
HELD_OUT_SHARE = 0.05
# Of rows that aren't many: so many, which a figure needs, up to this share of them.
HELD_OUT_LEAST, HELD_OUT_MOST = 60, 0.2
GSM8K_HELD_OUT, GSM8K_TUNE = 300, 100
# Shorter lines ("else:", "return None") stand everywhere and leak nothing.
SHARED_LINE_LEAST = 12


def load_rows(data: str, split: str) -> list[Row]:
    """The rows of one split of `data` (see `sources.read_source`), in its order: `train`,
    `heldout`, of that `tune` or `report` (see `part_of`), or `all` for a set that is wholly one or
    the other. ValueError for another, or an empty one.
    """
    check_one_of("split", split, SPLITS)
    files = read_source(data)
    rows = list(chain.from_iterable(files))
    if split == "all":
        return rows
    if split in HELD_OUT_PARTS:
        return part_of(load_rows(data, "heldout"), split)
    held_out = _held_out_gsm8k(files) | _held_out_by_hash(rows, by_file=data == "stdlib")
    chosen = [row for row in rows if (row.where in held_out) == (split == "heldout")]
    if data == "stdlib" and split == "heldout":
        chosen = _without_shared_lines(chosen, [row for row in rows if row.where not in held_out])
    if not chosen:
        raise ValueError(
            f"data: the {split} side of {data!r} is empty ({len(rows)} rows in all); expected more "
            "rows, or split=all"
        )
    return chosen


def part_of(rows: Sequence[Row], part: str) -> list[Row]:
    """Of held-out rows, those that choices are made on (`tune`: the best checkpoint, K), or those
    that figures are reported on (`report`). No row, and no text, is in both.

    Of GSM8K's 300 the first 100 are for tuning; of the library's files every second one, in the
    order of their sizes, so that both parts hold about as much; of other rows a third, by a hash.
    ValueError for an unknown part, or an empty one.
    """
    check_one_of("part", part, HELD_OUT_PARTS)
    library = [row for row in rows if row.where.startswith("stdlib:")]
    questions = [row for row in rows if row.kind == "question"]
    others = {row.text for row in rows} - {row.text for row in (*library, *questions)}
    tune = {row.text for row in sorted(library, key=lambda row: -len(row.text))[1::2]}
    tune |= {row.text for row in questions[:GSM8K_TUNE]}
    tune |= set(sorted(others, key=_digest)[: -(-len(others) // 3)])
    chosen = [row for row in rows if (row.text in tune) == (part == "tune")]
    if not chosen:
        raise ValueError(
            f"the {part} part of {len(rows)} held-out rows is empty; expected more rows, or data "
            "of which nothing was trained on, with split=all"
        )
    return chosen


def _held_out_gsm8k(files: list[list[Row]]) -> set[str]:
    held_out: set[str] = set()
    for rows in files:
        questions = [row.where for row in rows if row.kind == "question"]
        if questions and len(questions) <= GSM8K_HELD_OUT:
            raise ValueError(
                f"{questions[0]}: got {len(questions)} rows of question and answer, expected more "
                f"than the {GSM8K_HELD_OUT} that are held out; use split=all, or prompt/completion"
            )
        held_out.update(questions[-GSM8K_HELD_OUT:])
    return held_out


def _held_out_by_hash(rows: list[Row], *, by_file: bool) -> set[str]:
    """`where` of the share held out (of the bytes by file, else of the rows), least hash first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.kind != "question":
            groups.setdefault(row.where if by_file else row.text, []).append(row)
    if not groups:
        return set()
    sizes = {k: sum(len(row.completion) if by_file else 1 for row in groups[k]) for k in groups}
    whole = sum(sizes.values())
    least = 0 if by_file else min(HELD_OUT_LEAST, HELD_OUT_MOST * whole)
    room = max(HELD_OUT_SHARE * whole, least, min(sizes.values()))
    held_out: set[str] = set()
    for key in sorted(groups, key=_digest):
        if sizes[key] <= room:
            room -= sizes[key]
            held_out.update(row.where for row in groups[key])
    return held_out


def _without_shared_lines(held_out: list[Row], train: list[Row]) -> list[Row]:
    seen = {line.strip() for row in train for line in row.completion.splitlines()}
    rows = []
    for row in held_out:
        lines = row.completion.splitlines(keepends=True)
        kept = [s for s in lines if len(s.strip()) < SHARED_LINE_LEAST or s.strip() not in seen]
        if "".join(kept).strip():
            rows.append(Row(row.kind, row.where, completion="".join(kept)))
    return rows


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
