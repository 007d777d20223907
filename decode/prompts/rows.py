"""Rows of text: what a line of a data set means, and the files, hubs and corpus it is read from.

Kinds of rows, told apart by their fields:
    text        {"text"}                    a document
    completion  {"prompt", "completion"}    plain text, no chat template
    prompt      {"prompt"}                  a prompt without an answer (HumanEval)
    chat        {"messages": [{"role", "content"}, ...]}
    question    {"question", "answer"}      GSM8K: a chat where the tokenizer has a template
    turns       {"turns", "category"}       Spec-Bench, MT-bench: what a user says, turn by turn
"""

import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STDLIB_EXCLUDED = {
    *("site-packages", "dist-packages"),
    *("idlelib", "lib2to3", "encodings", "pydoc_data"),
}
STDLIB_LEAST_BYTES = 5_000_000
LAYOUTS = (
    '{"messages"}, {"prompt", "completion"}, {"prompt"}, {"text"}, '
    '{"question", "answer"} (GSM8K) or {"turns"} (Spec-Bench)'
)

Message = dict[str, str]


@dataclass(frozen=True)
class Row:
    """One row. `where` names it in messages: `path:line`, a hub's `name[i]`, or `stdlib:file`.
    ValueError for half of a surrogate pair, which JSON can spell and no encoding holds.
    """

    kind: str
    where: str
    prompt: str = ""
    completion: str = ""  # the answer; of a document, all of it
    messages: tuple[Message, ...] = ()
    category: str = ""  # of a benchmark's prompt
    later: tuple[str, ...] = ()  # what the user says after the answer to the prompt, and so on
    reference: str = ""  # a known answer to the prompt that nothing is trained on
    error: tuple[int, int] | None = None  # of an answer that people found wrong, in its characters

    def __post_init__(self) -> None:
        said = (str(value) for message in self.messages for value in message.values())
        own = (self.prompt, self.completion, self.category, self.reference)
        for text in (*own, *self.later, *said):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                near = text[max(0, error.start - 20) : error.start + 1]
                raise ValueError(
                    f"{self.where}: {near!r} ends in half of a character (a lone surrogate), "
                    r"expected whole ones, as \ud83d\ude00 is; mend the row or take it away"
                ) from error

    @property
    def text(self) -> str:
        """All words of the row, to train a tokenizer on or to tell two rows apart."""
        parts = [message["content"] for message in self.messages]
        return "\n".join(part for part in (*parts, self.prompt, self.completion) if part)


def read_source(data: str) -> list[list[Row]]:
    """The rows of each file of a data set; the corpus and a hub's data set count as one file.

    data: a JSONL or Parquet file, a folder of them, `stdlib`, `arithmetic` or `arithmetic:plain`,
    or a hub's `name[:config][@split]` (by default its train split). ValueError with path and line
    for missing or empty data, a malformed line, a row of unknown layout, a hub out of reach.
    """
    path = Path(data)
    if data in ("arithmetic", "arithmetic:plain"):
        from draftsmith.decode.prompts.arithmetic import HABIT, arithmetic_rows

        files = [arithmetic_rows(habit=HABIT if data == "arithmetic" else 0.0)]
    elif data == "stdlib":
        files = [stdlib_rows(Path(sysconfig.get_path("stdlib")))]
    elif path.is_dir():
        paths = sorted(p for p in path.rglob("*") if p.suffix in (".jsonl", ".parquet"))
        files = [_rows(_file(p)) for p in paths]
    elif path.is_file():
        files = [_rows(_file(path))]
    elif path.suffix or data.startswith((".", "/", "~")) or data.count("/") > 1:
        raise ValueError(f"data: got {data!r}, which does not exist; expected a file or a folder")
    else:
        found = enumerate(hub_dataset(data, "data"))
        files = [_rows((_present(fields), f"{data}[{number}]") for number, fields in found)]
    if not any(files):
        expected = "expected a JSONL or Parquet file with some"
        raise ValueError(f"data: {data!r} holds no rows; {expected}")
    return files


def parse(fields: Any, where: str) -> Row:
    """One row from its fields. Raises ValueError with `where` if its layout is none of ours."""
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: got a {type(fields).__name__}, expected an object: {LAYOUTS}")

    def word(name: str) -> str:
        value = fields[name]
        if not isinstance(value, str) or not value:
            raise ValueError(
                f"{where}: {name!r} is {value!r:.60}, expected a text that isn't empty"
            )
        return value

    # HumanEval has no category, but each of its prompts a name: HumanEval/17.
    category = str(fields.get("category") or str(fields.get("task_id", "")).partition("/")[0])
    if "messages" in fields:
        return Row("chat", where, messages=_messages(fields["messages"], where))
    if "turns" in fields:
        turns = fields["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise ValueError(f"{where}: 'turns' is {turns!r:.60}, expected a list of texts")
        first, *later = map(str, turns)
        known = fields.get("reference")  # one for each turn
        known = str(known[0]) if isinstance(known, list) and known else ""
        return Row("turns", where, first, category=category, later=tuple(later), reference=known)
    if "question" in fields and "answer" in fields:
        error = _error(fields, word("answer"), where)
        return Row("question", where, word("question"), word("answer"), error=error)
    if "prompt" in fields and "completion" in fields:
        error = _error(fields, word("completion"), where)
        return Row("completion", where, word("prompt"), word("completion"), error=error)
    if "prompt" in fields:
        return Row("prompt", where, word("prompt"), category=category)
    if isinstance(fields.get("text"), str):
        return Row("text", where, completion=fields["text"])
    raise ValueError(f"{where}: got the fields {sorted(fields)}, expected {LAYOUTS}")


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


def _error(fields: dict[str, Any], answer: str, where: str) -> tuple[int, int] | None:
    """The marked error of an answer, None without one."""
    span = fields.get("error")
    match span:
        case None:
            return None
        case [int(first), int(end)] if 0 <= first < end <= len(answer):
            return first, end
    raise ValueError(
        f"{where}: 'error' is {span!r:.60}, expected [first, end] in characters of the answer, "
        f"which has {len(answer)}, or none where it is right"
    )


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: 'messages' is {value!r:.60}, expected a list of messages")
    for number, message in enumerate(value):
        match message:
            # Without words it would be taken for an answer that ends at once.
            case {"role": "assistant", "content": str(content)}:
                sound = bool(content.strip())
            case {"role": str(), "content": str()}:
                sound = True
            case _:
                sound = False
        if not sound or message.get("tool_calls"):
            raise ValueError(
                f"{where}: message {number} is {message!r:.80}, expected a text in 'role' and in "
                "'content', of an assistant one that isn't empty (tool calls and images are not "
                "supported)"
            )
    return tuple(value)


def _rows(source: Iterable[tuple[Any, str]]) -> list[Row]:
    """Parsed rows, without documents that are blank (some sets separate their articles by them)."""
    rows = (parse(fields, where) for fields, where in source)
    return [row for row in rows if row.kind != "text" or row.completion.strip()]


def _file(path: Path) -> Iterator[tuple[Any, str]]:
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                if line.strip():
                    yield json.loads(line), where
            except ValueError as error:
                raise ValueError(
                    f"{where}: not JSON ({error}); expected one object a line"
                ) from error


def _parquet(path: Path) -> Iterator[tuple[Any, str]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        rows = (row for batch in ParquetFile(path).iter_batches() for row in batch.to_pylist())
        for number, fields in enumerate(rows, start=1):
            yield _present(fields), f"{path}: row {number}"
    except (pyarrow.ArrowInvalid, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({error})") from error


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    """A table has every column in every row: an absent field comes as null."""
    return {name: value for name, value in fields.items() if value is not None}


def hub_dataset(named: str, key: str, **options: Any) -> Any:
    """The data set `name[:config][@split]` of the hub; key: what messages call it."""
    from datasets import load_dataset

    name, _, part = named.partition("@")
    name, _, config = name.partition(":")
    try:
        return load_dataset(name, config or None, split=part or "train", **options)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key}: {named!r} is no file here, and as a data set of the hub it can't be loaded: "
            f"{error}. Expected files, a folder, `stdlib`, or name[:config][@split]"
        ) from error
