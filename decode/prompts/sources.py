"""Where rows come from: files, folders, the hub, and what every Python has.

`PRESETS` are names for data sets of the hub that drafts are trained on everywhere.
"""

import json
import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from draftsmith.decode.prompts.rows import Row, parse

STDLIB_EXCLUDED = {
    *("site-packages", "dist-packages"),
    *("idlelib", "lib2to3", "encodings", "pydoc_data"),
}
STDLIB_LEAST_BYTES = 5_000_000
READ = (".jsonl", ".json", ".parquet")
PRESETS = {
    "ultrachat": "HuggingFaceH4/ultrachat_200k@train_sft",  # 208k chats
    "sharegpt": "Aeala/ShareGPT_Vicuna_unfiltered@train",  # 120k, cut to size
    "perfectblend": "mlabonne/open-perfectblend@train",  # 1.4M: chat, maths, code
    "alpaca": "tatsu-lab/alpaca@train",  # 52k instructions
    "gsm8k": "openai/gsm8k:main@train",  # 7.5k questions
    "humaneval": "openai/openai_humaneval@test",  # 164 prompts
}
LEFT_OUT = 0.01  # of a public set's rows, at most, may be none of ours: nobody here can mend them


def read_source(data: str) -> list[list[Row]]:
    """The rows of each file of a data set; the corpus and a hub's data set count as one file.

    data: a JSONL, JSON (one array of rows) or Parquet file, a folder of them, `stdlib`,
    `arithmetic` or `arithmetic:plain`, one of `PRESETS`, or a hub's `name[:config][@split]` (by
    default its train split). ValueError with path and line for missing or empty data, a malformed
    line, a row of unknown layout, a hub out of reach.
    """
    path = Path(data)
    if data in ("arithmetic", "arithmetic:plain"):
        from draftsmith.decode.prompts.arithmetic import HABIT, arithmetic_rows

        files = [arithmetic_rows(habit=HABIT if data == "arithmetic" else 0.0)]
    elif data == "stdlib":
        files = [stdlib_rows(Path(sysconfig.get_path("stdlib")))]
    elif data.partition("@")[0] in PRESETS:
        files = [_hub_rows(data)]
    elif path.is_dir():
        files = [_rows(_file(p)) for p in sorted(path.rglob("*")) if p.suffix in READ]
    elif path.is_file():
        files = [_rows(_file(path))]
    elif path.suffix or data.startswith((".", "/", "~")) or data.count("/") > 1:
        there = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, there, n=1, cutoff=0.75)
        remedy = f"did you mean {path.parent / near[0]}?" if near else "expected a file or a folder"
        raise ValueError(f"got {data!r}, which does not exist; {remedy}")
    else:
        files = [_hub_rows(data)]
    if not any(files):
        expected = f"expected a file ({', '.join(READ)}) with some"
        raise ValueError(f"data: {data!r} holds no rows; {expected}")
    return files


def stdlib_rows(root: Path) -> list[Row]:
    """The Python sources under `root` as documents, in the order of their paths, without tests and
    what `STDLIB_EXCLUDED` names. ValueError under 5 MB of source (a stripped or zipped Python).
    """
    rows, paths = [], []
    for folder, inner, names in os.walk(root):
        inner[:] = {d for d in inner if not d.startswith("test")} - STDLIB_EXCLUDED  # not entered
        paths += [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith("test")]
    for path in sorted(paths, key=lambda p: p.relative_to(root).as_posix()):
        source = path.read_bytes().decode("utf-8", errors="replace")
        if source.strip():
            where = f"stdlib:{path.relative_to(root).as_posix()}"
            rows.append(Row("text", where, completion=source))
    size = sum(len(row.completion) for row in rows)
    if size < STDLIB_LEAST_BYTES:
        raise ValueError(
            f"stdlib: got {size / 1e6:.1f} MB of library source under {root}, expected at least "
            f"{STDLIB_LEAST_BYTES / 1e6:.0f}; use a complete Python, or give data= a text of yours"
        )
    return rows


def hub_dataset(named: str, key: str, **options: Any) -> Any:
    """The data set `name[:config][@split]` of the hub, or a preset's (`name[@split]`); key: what
    messages call it. ValueError: one that isn't there or can't be reached.
    """
    preset, _, split = named.partition("@")
    full = PRESETS.get(preset, named)
    if preset in PRESETS and split:
        full = f"{full.partition('@')[0]}@{split}"
    name, _, part = full.partition("@")
    name, _, config = name.partition(":")
    part = part or "train"
    from datasets import load_dataset

    try:
        return load_dataset(name, config or None, split=part, **options)
    except (OSError, ValueError) as error:
        fetched = f"{name}{f' ({config})' if config else ''}, split {part}"
        what = f"{named!r} is no file here, and as a data set of the hub it can't be loaded"
        if preset in PRESETS:
            what = f"{named!r} names a data set of the hub, which can't be fetched"
        raise ValueError(
            f"{key}: {what}: {error}. It would be {fetched}, kept in the cache of `datasets` once "
            "it has been fetched. Expected a network, files, a folder, `stdlib`, "
            f"name[:config][@split], or one of {', '.join(PRESETS)}"
        ) from error


def _hub_rows(data: str) -> list[Row]:
    """Those of a public set; a few that are none of ours are left out, and told of."""
    found: list[Row] = []
    lost: list[str] = []
    for number, fields in enumerate(hub_dataset(data, "data")):
        try:
            found.append(parse(present(fields), f"{data}[{number}]"))
        except ValueError as error:
            lost.append(str(error))
            if not found:  # the first row says what they all are
                raise
    if len(lost) > LEFT_OUT * len(found):
        raise ValueError(f"{lost[0]} (and {len(lost) - 1} more of {len(lost) + len(found)} rows)")
    if lost:
        warnings.warn(f"{data}: {len(lost)} rows are left out, such as {lost[0]}", stacklevel=4)
    return _worded(found)


def _rows(source: Iterable[tuple[Any, str]]) -> list[Row]:
    return _worded([parse(fields, where) for fields, where in source])


def _worded(rows: list[Row]) -> list[Row]:
    """Rows without the blank ones; of those that are no documents it is told."""
    blank = [row.where for row in rows if row.blank and row.kind != "text"]
    if blank:
        warnings.warn(
            f"{len(blank)} of {len(rows)} rows have no question, or an answer without words, and "
            f"are left out: {blank[0]} for one",
            stacklevel=4,
        )
    return [row for row in rows if not row.blank]


def _file(path: Path) -> Iterator[tuple[Any, str]]:
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    with path.open("rb") as file:
        if path.suffix == ".json" and file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
            yield from _array(path)
            return
        file.seek(0)
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                if line.strip():
                    yield json.loads(line), where
            except ValueError as error:
                expected = "one array of objects, or one object a line"
                if path.suffix != ".json":
                    expected = "one object a line"
                raise ValueError(f"{where}: not JSON ({error}); expected {expected}") from error


def _array(path: Path) -> Iterator[tuple[Any, str]]:
    """The rows of a file that holds one array, each with the line that it begins in."""
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}); expected an array of rows") from error
    read = json.JSONDecoder().raw_decode
    place, line, number = text.index("[") + 1, 1, 0
    counted = 0  # characters whose line ends are counted
    while True:
        while text[place : place + 1].isspace() or text[place : place + 1] == ",":
            place += 1
        line, counted = line + text.count("\n", counted, place), place
        if text[place : place + 1] == "]":
            if text[place + 1 :].strip():
                raise ValueError(f"{path}:{line}: got more after the array, expected one alone")
            return
        number += 1
        where = f"{path}:{line}, row {number}"
        try:
            fields, place = read(text, place)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error}); expected an array of rows") from error
        yield fields, where


def _parquet(path: Path) -> Iterator[tuple[Any, str]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        rows = (row for batch in ParquetFile(path).iter_batches() for row in batch.to_pylist())
        for number, fields in enumerate(rows, start=1):
            yield present(fields), f"{path}: row {number}"
    except (pyarrow.ArrowInvalid, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({error})") from error


def present(value: Any) -> Any:
    """A table has every column in every row, in nested objects too: an absent field is null."""
    if isinstance(value, dict):
        return {name: present(inner) for name, inner in value.items() if inner is not None}
    return [present(item) for item in value] if isinstance(value, list) else value
