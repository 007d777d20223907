"""The rules of the house, read from its source. Each rule is also shown to find what it forbids.

A rule is a function of the files (path from the root -> text) that returns its complaints.
"""

import ast
import functools
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path, PurePosixPath

import yaml

Files = dict[str, str]
Pairs = list[tuple[str, str]]

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "models": {"models"},
    "decode": {"models", "decode", "draftsmith"},
    "train": {"models", "decode", "train", "recipes", "draftsmith"},
    "recipes": set(),
    "draftsmith": {"models", "decode", "train", "recipes", "draftsmith"},
    "bench": {"models", "decode", "train", "recipes", "draftsmith", "bench"},
    "examples": {"models", "decode", "train", "recipes", "draftsmith"},
    "tests": {"models", "decode", "train", "recipes", "draftsmith", "bench"},
}
PACKAGED = ("draftsmith", "models", "decode", "train", "recipes")
ENTRIES = {"prepare", "distill", "pretrain", "heads", "eagle", "scorers", "online", "quickstart"}
MODEL_LIBRARIES = {"torch", "transformers", "safetensors", "tokenizers", "huggingface_hub", "numpy"}
MODEL_LIBRARIES |= {"filelock", "peft", "torchao", "gguf"}  # all but the first are optional
OPTIONAL = ("hydra", "omegaconf", "datasets", "deepspeed", "openai", "peft", "torchao", "wandb")
OPTIONAL += ("gguf", "llguidance")
VAGUE = {"utils", "util", "helpers", "helper", "misc", "common"}
# A recipe's entry is compared by train/run/recipe.py while it is still a key, not an attribute.
# These import torch and one another, nothing else.
TORCH_ALONE = ("train/losses/", "decode/top_k.py")
# A family's options are named by its objective, which the entry finds by the family's name.
READ_AS_KEY = {"entry": "train/run/recipe.py", "own_heads": "train/objectives/medusa.py"}
READ_AS_KEY |= dict.fromkeys(("prefix", "dropout", "noise"), "train/objectives/hydra.py")
READ_AS_KEY |= {"glance": "train/objectives/falcon.py", "block": "train/objectives/falcon.py"}
READ_AS_KEY |= {"early": "train/objectives/kangaroo.py"}
READ_AS_KEY |= dict.fromkeys(("window", "offset"), "train/objectives/longspec.py")
TEXT = "as a text"
MAX_FILE, MAX_BODY, MAX_PARAMETERS, MAX_YAML, MAX_ROOM = 400, 60, 8, 40, 13


def house() -> Files:
    paths = [path for room in MAY_IMPORT for path in (ROOT / room).rglob("*")]
    kept = [p for p in paths if p.suffix in (".py", ".yaml") and "__pycache__" not in p.parts]
    files = [*kept, ROOT / "pyproject.toml"]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in files}


parse = functools.lru_cache(maxsize=None)(ast.parse)


def python(files: Files, *rooms: str) -> Iterator[tuple[str, ast.Module]]:
    for path, text in files.items():
        if path.endswith(".py") and (not rooms or path.split("/")[0] in rooms):
            yield path, parse(text)


@functools.cache
def imported(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, full name) of everything a file imports anywhere; relative ones begin with a dot."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "") + "."
            found += [(node.lineno, base + alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            if getattr(called, "id", called) in ("import_module", "__import__"):
                found.append((node.lineno, str(node.args[0].value)))
    return found


def import_directions(files: Files) -> list[str]:
    """One way only; entries stand alone; losses need torch alone; full names, not relative ones."""
    found = []
    for path, tree in python(files):
        room = path.split("/")[0]
        for line, name in imported(tree):
            first, *rest = name.split(".")
            goal = rest[0] if rest and rest[0] in MAY_IMPORT else "draftsmith"
            where = f"{path}:{line}: "
            if not first:
                found.append(where + f"relative import {name}")
            elif first in PACKAGED[1:]:
                found.append(where + f"{name} without draftsmith. before it")
            elif first == "draftsmith":
                # The package itself holds nothing but its version.
                if goal not in MAY_IMPORT[room] and name != "draftsmith.__version__":
                    found.append(where + f"{room} imports {name}")
                if room == "train" and rest[:1] == ["train"] and rest[1:2] and rest[1] in ENTRIES:
                    found.append(where + f"imports the entry {name}")
                if path.startswith(TORCH_ALONE) and not "/".join(rest).startswith(
                    tuple(place.removesuffix(".py") for place in TORCH_ALONE)
                ):
                    found.append(where + f"imports {name}, not torch alone")
            elif first not in sys.stdlib_module_names:
                if room == "models" and first not in MODEL_LIBRARIES:
                    found.append(where + f"models import {first}")
                if path.startswith(TORCH_ALONE) and first != "torch":
                    found.append(where + f"imports {first}, not torch alone")
    return found


def room_of(path: str, name: str, files: Files) -> str:
    """The folder that a file's import leads to; scripts and entries are a room of their own."""
    parts = name.split(".")[1:]
    while parts and "/".join(parts) + ".py" not in files:
        parts.pop()
    return folder("/".join(parts) + ".py") if parts else folder(path)


def folder(path: str) -> str:
    is_entry = path.endswith("__main__.py") or (path.startswith("train/") and path.count("/") == 1)
    return path if is_entry else PurePosixPath(path).parent.as_posix()


def cycles(files: Files) -> list[str]:
    """Rooms that reach themselves by imports, one way round each."""
    doors: dict[str, dict[str, str]] = {}
    for path, tree in python(files, *PACKAGED):
        here = folder(path)
        for line, name in imported(tree):
            there = room_of(path, name, files) if name.startswith("draftsmith.") else here
            if there != here:
                doors.setdefault(here, {}).setdefault(there, f"{path}:{line}")
    left = dict(doors)
    while found := [room for room, goals in left.items() if not goals.keys() & left.keys()]:
        for room in found:  # nothing that is left can be reached from it
            del left[room]
    inside = {room for room in left if any(room in goals for goals in left.values())}
    ways = [
        f"{where} {there}"
        for room in inside
        for there, where in left[room].items()
        if there in inside
    ]
    return ["rooms in a circle: " + "; ".join(sorted(ways))] if ways else []


def crowds(files: Files) -> list[str]:
    """Rooms with too many files."""
    rooms = Counter(
        PurePosixPath(path).parent.as_posix()
        for path, _ in python(files, *PACKAGED)
        if not path.endswith("__init__.py")
    )
    return [f"{room}: {n} files, {MAX_ROOM} allowed" for room, n in rooms.items() if n > MAX_ROOM]


def class_names(files: Files) -> list[str]:
    """Public classes of one name in two files of the package."""
    homes: dict[str, list[str]] = {}
    for path, tree in python(files, *PACKAGED):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(path)
    return [f"class {name} in {', '.join(at)}" for name, at in homes.items() if len(at) > 1]


def sizes(files: Files) -> list[str]:
    found = []
    for path, tree in python(files):
        lines = files[path].count("\n")
        if lines > MAX_FILE:
            found.append(f"{path}: {lines} lines, {MAX_FILE} allowed")
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = node.end_lineno - body[0].lineno + 1 if body else 0
            if length > MAX_BODY:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines")
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            count = len([a for a in arguments if a.arg not in ("self", "cls")])
            if count > MAX_PARAMETERS:
                found.append(f"{path}:{node.lineno}: {node.name} has {count} parameters")
    return found


def swallowing(files: Files) -> list[str]:
    """A bare `except` or one of Exception; of BaseException, unless it raises again at its end."""
    found = []
    for path, tree in python(files):
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {getattr(kind, "id", "everything" if kind is None else "") for kind in kinds}
            last = node.body[-1]
            if isinstance(last, ast.Raise) and last.exc is None:
                names.discard("BaseException")
            for name in names & {"everything", "Exception", "BaseException"}:
                found.append(f"{path}:{node.lineno}: catches {name}")
    return found


def vague_names(files: Files) -> list[str]:
    return [f"{p}: name it after the noun" for p in files if PurePosixPath(p).stem in VAGUE]


def shadowing(files: Files) -> list[str]:
    """A script's folder comes first on the import path: what lies in it, files and folders, must
    not have a name that is taken.
    """
    installed = {n for n, by in packages_distributions().items() if "draftsmith" not in by}
    taken = installed | set(sys.stdlib_module_names)
    beside = {
        PurePosixPath(*PurePosixPath(path).parts[: script.count("/") + 1]).as_posix()
        for script, _ in python(files, "train", "decode", "bench", "examples")
        if is_script(script)
        for path, _ in python(files, script.split("/")[0])
        if path.startswith(script.rpartition("/")[0] + "/")
    }
    return [
        f"{path}: hides the module {PurePosixPath(path).stem}"
        for path in sorted(beside)
        if PurePosixPath(path).stem in taken - {"__main__", "__init__"}
    ]


def is_script(path: str) -> bool:
    """Whether people run this file by its path: the entries, benchmarks, examples."""
    scripts = path.startswith(("bench/", "examples/"))
    return scripts or (path.startswith("train/") and path.count("/") == 1)


def records(files: Files) -> Iterator[tuple[str, ast.ClassDef]]:
    """(path, class) of every dataclass in train/ and in models/target.py."""
    for path, tree in python(files, "train", "models"):
        if path.startswith("models/") and path != "models/target.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(
                last(getattr(mark, "func", mark)) == "dataclass" for mark in node.decorator_list
            ):
                yield path, node


def fields(files: Files) -> Iterator[tuple[str, str, ast.AnnAssign]]:
    """(path, class, field) of all of these."""
    for path, node in records(files):
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                yield path, node.name, item


def last(node: ast.AST | None) -> str:
    """The last word of `a`, `b.a`."""
    return getattr(node, "attr", getattr(node, "id", ""))


def groups(files: Files) -> dict[str, set[str]]:
    """Of each class that is a field's of another: what those fields are called."""
    found: dict[str, set[str]] = {node.name: set() for _, node in records(files)}
    for _, _, item in fields(files):
        if last(item.annotation) in found:
            found[last(item.annotation)].add(last(item.target))
    return {name: called for name, called in found.items() if called}


def given(node: ast.Assign) -> Pairs:
    """Names that an assignment makes, and the one that each is given."""
    goal, value = node.targets[0], node.value
    several = isinstance(goal, ast.Tuple) and isinstance(value, ast.Tuple)
    pairs = zip(goal.elts, value.elts, strict=True) if several else [(goal, value)]
    return [(last(into), last(one)) for into, one in pairs if last(into)]


def called(typed: Pairs, made: list[Pairs], group: str, names: set[str]) -> set[str]:
    """What a group goes by: fields and parameters of its class, and what these are assigned to."""
    names = {*names, "self"} | {name for kind, name in typed if kind == group}
    for pairs in made:
        names |= {into for into, one in pairs if one in names}
    return names


def dead_fields(files: Files) -> list[str]:
    """Fields that nobody reads of those who may hold the object: the files that import from where
    it is defined, and the files that these import from, to which they hand it. Of a group, whose
    fields have common names, a read is one by what the group goes by; or by its name as a text."""
    trees = dict(python(files, *PACKAGED, "bench"))
    uses: dict[str, set[str]] = {path: {path} for path in trees}
    for path, tree in trees.items():
        for _, name in imported(tree):
            first, *parts = name.split(".")
            goals = {"/".join(parts[:end]) + ".py" for end in range(1, len(parts) + 1)}
            uses[path] |= goals & trees.keys() if first == "draftsmith" else set()
    reads = {
        path: {(node.attr, last(node.value)) for node in ast.walk(tree) if is_read(node)}
        | {(node.value, TEXT) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        for path, tree in trees.items()
    }
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    typed = [(last(node.annotation), node.arg) for node in nodes if isinstance(node, ast.arg)]
    made = [given(node) for node in nodes if isinstance(node, ast.Assign)]
    held = {name: called(typed, made, name, fields) for name, fields in groups(files).items()}
    bases = {node.name: {last(base) for base in node.bases} for _, node in records(files)}
    own = {(name, last(item.target)) for _, name, item in fields(files)}
    found = []
    for path, owner, item in fields(files):
        field = last(item.target)
        if any((base, field) in own for base in bases[owner]):
            continue  # another default of a field that is read as its base's
        holders = set().union(*(used for used in uses.values() if path in used))
        keys = files.get(READ_AS_KEY.get(field, ""), "")
        as_key = f'"{field}"' in keys or f'.{field}"' in keys
        by = {by for holder in holders for name, by in reads[holder] if name == field}
        if not as_key and not (by & {*held[owner], TEXT} if owner in held else by - {TEXT}):
            found.append(f"{path}: nobody reads {owner}.{field}")
    return found


def config_shape(files: Files) -> list[str]:
    """A recipe's dataclass inherits nothing, but an entry's from Settings; a group holds none."""
    named = [(path, node) for path, node in records(files) if path.startswith("train/")]
    recipes = {
        node.name for _, node in named if "kw_only=True" in ast.unparse(node.decorator_list[0])
    }
    held, found, kinds = groups(files), [], {}
    for _, name, item in fields(files):
        kinds.setdefault(name, set()).add(last(item.annotation))
    for path, node in named:
        if node.name not in recipes:
            continue
        bases = [last(base) for base in node.bases]
        entry = path.count("/") == 1 and node.name not in held
        if bases and not (entry and bases == ["Settings"]):
            found.append(f"{path}: {node.name} inherits from {', '.join(bases)}")
        if node.name in held and kinds.get(node.name, set()) & held.keys():
            found.append(f"{path}: the group {node.name} holds a group")
    return found


def is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)


def recipes_of(files: Files) -> list[str]:
    paths = [path for path in files if path.startswith("recipes/") and path.endswith(".yaml")]
    return [path for path in paths if not path.startswith("recipes/accelerate/")]


def recipe_files(files: Files) -> list[str]:
    found = []
    for path in recipes_of(files):
        lines = files[path].splitlines()
        if len(lines) > MAX_YAML:
            found.append(f"{path}: {len(lines)} lines, {MAX_YAML} allowed")
        entry = (yaml.safe_load(files[path]) or {}).get("entry")
        if f"train/{entry}.py" not in files:
            found.append(f"{path}: entry {entry!r} is no script of train/")
        name = path.removeprefix("recipes/").removesuffix(".yaml")
        if not any(line.startswith("#") and f"recipe={name}" in line for line in lines):
            found.append(f"{path}: its header lacks the launch command with recipe={name}")
    return found


def packages(files: Files) -> list[str]:
    """pyproject's packages are the folders that hold Python, but for tests/."""
    table = tomllib.loads(files["pyproject.toml"])["tool"]["setuptools"]
    tops = table["package-dir"]
    held = {PurePosixPath(path).parent.as_posix() for path, _ in python(files, *PACKAGED, "bench")}
    expected = {f"draftsmith.{f}".replace("/", "."): f for f in held if f != "draftsmith"}
    expected["draftsmith"] = "draftsmith"
    folders = {}
    for name in table["packages"]:
        top = ".".join(name.split(".")[:2])  # setuptools finds a package within its top folder
        folders[name] = tops.get(top, "?") + name.removeprefix(top).replace(".", "/")
    wrong = sorted(expected.items() ^ folders.items(), key=str)
    return [f"pyproject.toml: package {name} at {folder}" for name, folder in wrong]


RULES: dict[str, Callable[[Files], list[str]]] = {
    rule.__name__: rule
    for rule in (
        import_directions,
        cycles,
        crowds,
        class_names,
        sizes,
        swallowing,
        vague_names,
        shadowing,
        dead_fields,
        config_shape,
        recipe_files,
        packages,
    )
}
