"""The command line of every command and entry: a dataclass in, a function, an exit code.

`key=value`, `--key value` and `--key=value` are the same, and `--key` alone says true. A key in a
group is `group.key`; a plain value for a group is that of its first key, so that `target=PATH` says
`target.path`; a table for it says several. A list is `[a,b]` or one value alone, a table
`{a:1,b:2}`, nothing at all `none`.

Exit codes: 0 done, 1 failed, 2 the user's error (one line on stderr), 130 interrupted.
"""

import dataclasses
import difflib
import math
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from draftsmith.manual import manual

OF_PATHS = (
    *(FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError),
    PermissionError,
)
T = TypeVar("T")
N = TypeVar("N", int, float)
Main = Callable[[list[str]], int | None]

USERS_ERROR, INTERRUPTED = 2, 130
# A quoted text, or a bare key with its colon (the group), after which YAML wants a space.
BARE_KEY = re.compile(
    r"""(?<=[\s:,{[])(?:"(?:\\.|[^"\\])*"|'[^']*')|((?:^|[{,])\s*[^:,{}[\]"']+?:)(?!\s)"""
)
OTHERS_WAIT_S = 60.0  # for the first process to tell the same error; the launcher ends them then
# What needs less memory, by the key that a command may have; the first that it has come first.
LESS = {
    "batch_size": "a smaller batch_size",
    "accumulation": "as much more accumulation",
    "max_length": "a shorter max_length",
    "max_new_tokens": "fewer max_new_tokens",
    "text.max_length": "a shorter text.max_length",
    "gradient_checkpointing": "gradient_checkpointing=true",
    "cache.path": "cache.path=FOLDER",
    "shard_target": "shard_target=true",
    "dtype": "dtype=bfloat16",
}


def run_command(main: Main, schema: type) -> NoReturn:
    """End the process by `main` with its arguments, or by the manual of its settings."""
    argv = sys.argv[1:]
    if asks_manual(argv):
        print(manual(Path(str(sys.modules[main.__module__].__file__)), schema.__name__))
        sys.exit(0)
    sys.exit(guarded(main, argv, lambda: kinds(schema)))


def guarded(main: Main, argv: list[str], keys: Callable[[], Collection[str]] = tuple) -> int:
    """The exit code of `main`, whose settings have these keys. Only what is neither the user's
    error nor a lack of memory has a traceback.
    """
    warnings.formatwarning = plain_warning
    try:
        return main(spelled(argv)) or 0
    except (RuntimeError, MemoryError) as error:
        if not (lack := out_of_memory(error)):
            raise
        helps = [what for key, what in LESS.items() if key in keys()]
        tell(MemoryError(f"{lack}; expected less{': ' if helps else ''}{', '.join(helps)}"))
        return 1
    except (ValueError, *OF_PATHS) as error:
        tell(error)
        return USERS_ERROR
    except KeyboardInterrupt as stop:
        print(f"interrupted: {stop}".rstrip(": "), file=sys.stderr)
        return INTERRUPTED


def plain_warning(message: Warning | str, category: type[Warning], *place: Any, **_: Any) -> str:
    """One line, without the place in the source where it is the user who is told."""
    where = "" if category is UserWarning else f" ({category.__name__}, {place[0]}:{place[1]})"
    return f"warning: {message}{where}\n"


def out_of_memory(error: BaseException) -> str:
    """What was asked and what there is, where the error is a lack of memory; else nothing."""
    text = str(error)
    lacks = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not lacks and not re.search("out of memory|can't allocate memory", text):
        return ""
    asked = re.search(r"(?:[Tt]ried|Unable) to allocate ([\d.]+) ?(bytes|[KMGTP]iB)", text)
    free = re.search(r"capacity of ([\d.]+ \wiB) of which ([\d.]+ \wiB) is free", text)
    if free:
        there = f"{free[2]} of the GPU's {free[1]}"
    else:
        import psutil

        memory = psutil.virtual_memory()
        there = f"{memory.available / 2**30:,.1f} of this machine's {memory.total / 2**30:,.1f} GiB"
    size = f"{asked[1]} {asked[2]}" if asked else "more"
    if asked and asked[2] == "bytes":
        size = f"{int(asked[1]) / 2**30:,.2f} GiB"
    return f"out of memory: got {size} to allocate where {there} are free"


def asks_manual(argv: list[str]) -> bool:
    """Whether it is the manual that is wanted."""
    return argv[:1] == ["help"] or not {"-h", "--help"}.isdisjoint(argv)


def tell(error: Exception) -> None:
    """One line on stderr, by the first process that has the error; its place, if not in ours."""
    if int(os.environ.get("RANK", "0")):
        time.sleep(OTHERS_WAIT_S)
    trace = traceback.walk_tb(error.__traceback__)
    places = [("__main__", 0), *((frame.f_globals["__name__"], line) for frame, line in trace)]
    module, line = places[-1]
    where = "" if module.startswith(("draftsmith.", "__main__")) else f" ({module}:{line})"
    says = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror and error.filename:
        expected = "expected a path that can be read or written"
        says, where = f"got {error.filename} ({error.strerror}), {expected}; correct it", ""
    print(f"error: {says}{where}", file=sys.stderr)


def spelled(argv: list[str]) -> list[str]:
    """Every argument as `key=value`; one without a key stays as it is."""
    left, found = list(argv), []
    while left:
        word = left.pop(0)
        if word.startswith("--"):
            key, equals, text = word[2:].partition("=")
            if not equals:
                text = left.pop(0) if left and not left[0].startswith("--") else "true"
            word = f"{key.replace('-', '_')}={text}"
        found.append(word)
    return found


def parse(schema: type[T], argv: list[str], first: str = "") -> T:
    """An instance of the dataclass `schema`. first: the key of a value that begins `argv` alone.
    ValueError: an unknown or missing key, a value of another type, or what `schema` raises.
    """
    if first and argv and not any(argv[0].startswith(f"{key}=") for key in kinds(schema)):
        argv = [f"{first}={argv[0]}", *argv[1:]]
    missing: list[str] = []
    made = _made(schema, given(schema, argv), "", missing)
    if made is None:
        raise ValueError(f"missing: {' '.join(f'{key}=...' for key in missing)}")
    return made


def parted(schema: type[T], argv: list[str]) -> tuple[T, list[str]]:
    """An instance of `schema`, and the arguments whose keys aren't its own."""
    mine = [word for word in argv if word.partition("=")[0] in kinds(schema)]
    return parse(schema, mine), [word for word in argv if word not in mine]


def given(schema: type, argv: list[str]) -> dict[str, Any]:
    """Full key -> typed value of `key=value` arguments; ValueError as for `parse`."""
    known = kinds(schema)
    found: dict[str, Any] = {}
    for argument in argv:
        group, equals, text = argument.partition("=")
        key = place(group, known)
        if key != group and text.startswith("{"):
            table = _read(group, text, dict)
            found |= given(schema, [f"{group}.{k}={v}" for k, v in table.items()])
            continue
        if key not in known:
            raise ValueError(unknown("key", key, known))
        if not equals:
            raise ValueError(f"argument {argument!r}: got no value, expected {key}=...")
        found[key] = _typed(key, text, known[key])
    return found


def kinds(schema: Any, group: str = "") -> dict[str, Any]:
    """Full key -> type of every field, those in groups too."""
    found: dict[str, Any] = {}
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind, key = hints[field.name], group + field.name
        found |= kinds(kind, f"{key}.") if dataclasses.is_dataclass(kind) else {key: kind}
    return found


def place(key: str, known: Collection[str]) -> str:
    """The full key of what is said of `key`: of a group, its first."""
    return key if key in known else next((k for k in known if k.startswith(f"{key}.")), key)


def check_least(settings: Any, **least: float) -> None:
    """ValueError for a field below the least that it may be, or not a finite number."""
    for name, number in least.items():
        got = getattr(settings, name)
        if got is not None and not number <= got < math.inf:
            end = ", and finite" if got == math.inf else ""
            raise ValueError(f"{name}: got {got}, expected at least {number}{end}")


def numbers(name: str, text: str, kind: type[N], *, least: float = 0.0) -> list[N]:
    """Those in a list with commas between; ValueError for what isn't one, or below the least."""
    try:
        found = [kind(part) for part in text.split(",")]
        if all(least <= number < math.inf for number in found):
            return found
    except ValueError:
        pass
    of = "whole numbers" if kind is int else "numbers"
    raise ValueError(f"{name}: got {text!r}, expected {of} from {least:g} up, as 1,4,16")


def check_one_of(name: str, got: str, known: Collection[str]) -> None:
    """ValueError for a word that is none of those known."""
    if got not in known:
        raise ValueError(f"{name}: got {got!r}, expected one of {', '.join(known)}")


def unknown(what: str, word: str, known: Collection[str]) -> str:
    """What to answer: words with the same last part, those that it begins, or the nearest one."""
    begun = [one for one in known if one.startswith(f"{word} ")]
    near = [one for one in known if one.rpartition(".")[2] == word.rpartition(".")[2]]
    if near := near or ([] if begun else difflib.get_close_matches(word, known, n=1)):
        return f"unknown {what} {word!r}: did you mean {' or '.join(near)}?"
    return f"unknown {what} {word!r}: there are {', '.join(begun or known)}"


def _made(schema: Any, values: dict[str, Any], group: str, missing: list[str]) -> Any:
    """The dataclass with these values; None where one is missing, which is noted."""
    hints, own = get_type_hints(schema), {}
    for field in dataclasses.fields(schema):
        key = group + field.name
        within = any(name.startswith(f"{key}.") for name in values)
        unset = (field.default, field.default_factory) == (dataclasses.MISSING,) * 2
        if dataclasses.is_dataclass(hints[field.name]) and (within or unset):
            own[field.name] = _made(hints[field.name], values, f"{key}.", missing)
        elif key in values:
            own[field.name] = values[key]
        elif unset:
            missing.append(key)
    return None if missing else schema(**own)


def _typed(key: str, text: Any, kind: Any) -> Any:
    """The one conversion of an argument's text."""
    if not isinstance(text, str):
        raise ValueError(f"{key}: got {text} within a list or table, expected one value")
    origin, inner = get_origin(kind), get_args(kind)
    if NoneType in inner:
        nothing = text.lower() in ("", "none", "null")
        return None if nothing else _typed(key, text, next(k for k in inner if k is not NoneType))
    if origin in (list, tuple):
        items = _read(key, text, list) if text.startswith("[") else [text] if text else []
        return origin(_typed(key, item, inner[0]) for item in items)
    if origin is dict:
        table = _read(key, text, dict)
        return {name: _typed(key, item, inner[1]) for name, item in table.items()}
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{key}: got {text!r}, expected true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{key}: got {text!r}, expected {kind.__name__}") from None


def _read(key: str, text: str, kind: type) -> Any:
    """A list or table of texts, as YAML writes them."""
    import yaml

    def loaded(written: str) -> Any:
        try:
            return yaml.load(written, yaml.BaseLoader)  # every value is left a text
        except yaml.YAMLError:
            return None

    found = loaded(text)
    if not isinstance(found, kind) or _unspaced(found):
        found = loaded(BARE_KEY.sub(lambda word: word[0] + " " * bool(word[1]), text))
    if not isinstance(found, kind):
        like = '[one,"a, b"]' if kind is list else "{one:1,other:2}"
        raise ValueError(f"{key}: got {text!r}, expected a {kind.__name__} such as {like}")
    return found


def _unspaced(found: Any) -> bool:
    """Whether a key, at any depth, has a colon in it: so YAML reads `one:1`."""
    within = found.items() if isinstance(found, dict) else ()
    return any(":" in key or _unspaced(value) for key, value in within)
