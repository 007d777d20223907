"""What a command says of itself, read from its source: nothing of it is imported, so no torch.

A key's description is the comment beside its field, or the one above it.
"""

import ast
import importlib.util
import io
import shutil
import textwrap
import tokenize
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOM = 28  # of a key and its default
SPELLING = "Keys, as key=value or --key value, with their defaults; one with ... must be given:"
# Of keys that mean the same everywhere, where a field says nothing more of them.
COMMON = {
    "target": "a folder in transformers' layout, or a hub's name",
    "drafter": "a drafter's folder or hub name",
    "prompts": "a file of rows or text, or stdlib",
    "split": "train | heldout | all",
    "out": "the folder to write",
    "temperature": "0: greedy",
    "top_k": "the likeliest so many; 0: all",
    "top_p": "the likeliest that hold so much; 1: all",
    "min_p": "those of at least so much of the likeliest one; 0: all",
    "max_new_tokens": "of an answer",
    "prompt_tokens": "of a prompt cut from running text",
    "thinking": "true | false, of a thinking model's chat template; none: as it does by itself",
    "template_kwargs": "JSON of other names that the chat template reads",
    "batch_size": "prompts decoded together",
    "K": "draft calls a round",
    "tree": "chain, medusa-63, eagle-25, dynamic:levels,width,nodes, kary:4,2,2, or a JSON file",
    "rule": "coupled | point_mass | leviathan | block | recursive | traversal | multi-draft | "
    "k-seq",
    "policy": "how much to draft: "
    "fixed | auto | budget | tetris | table | confidence | entropy | acceptance | depth | "
    "gain | cost | cut | exits",
    "device": "where it runs",
    "dtype": "float32 | bfloat16 | auto: as it was saved",
    "entry": "the script of train/ that a recipe is for",
}
EMPTY = {"list": "[]", "dict": "{}", "()": "[]", "True": "true", "False": "false", "None": "none"}


class Key(NamedTuple):
    """One setting; default: as the command line spells it, None where it must be given."""

    name: str
    default: str | None
    says: str


def manual(file: Path, schema: str, *, before: Sequence[Key] = ()) -> str:
    """A module's docstring and the keys of its configuration class, after those of another."""
    source = SourceFile(file)
    width = max(60, min(110, shutil.get_terminal_size().columns)) - ROOM - 2
    lines = [ast.get_docstring(source.tree) or "", "", SPELLING, ""]
    taken = {key.name for key in before}
    for key in (*before, *(key for key in source.keys(schema) if key.name not in taken)):
        head = f"  {key.name}={'...' if key.default is None else key.default}"
        if len(head) > ROOM:
            lines.append(head)
            head = ""
        first, *more = textwrap.wrap(key.says or COMMON.get(key.name, ""), width) or [""]
        lines.append(f"{head:<{ROOM}}  {first}".rstrip())
        lines += [" " * (ROOM + 2) + line for line in more]
    return "\n".join(lines)


class SourceFile:
    """A file of ours as text."""

    def __init__(self, file: Path) -> None:
        text = file.read_text(encoding="utf-8")
        self.tree = ast.parse(text)
        self.classes = {n.name: n for n in self.tree.body if isinstance(n, ast.ClassDef)}
        self.imports = {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in self.tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = [token for token in tokens if token.type == tokenize.COMMENT]
        self.beside = {t.start[0]: t.string.lstrip("# ") for t in comments}
        self.alone = {t.start[0] for t in comments if not t.line[: t.start[1]].strip()}

    def find(self, name: str) -> "tuple[SourceFile, ast.ClassDef] | None":
        """A class of this file, or one of ours that it imports, and where it is."""
        if name in self.classes:
            return self, self.classes[name]
        module, original = self.imports.get(name, ("", ""))
        return of_module(module).find(original) if module.startswith("draftsmith.") else None

    def keys(self, schema: str) -> list[Key]:
        """The fields of a dataclass in their order, those of its bases first."""
        found: dict[str, Key] = {}
        if place := self.find(schema):
            source, node = place
            for base in reversed(node.bases):
                found |= {key.name: key for key in source.keys(ast.unparse(base))}
            fields = (item for item in node.body if isinstance(item, ast.AnnAssign))
            for key in (key for field in fields for key in source.described(field)):
                found[key.name] = key._replace(says=key.says or found.get(key.name, key).says)
        return list(found.values())

    def described(self, item: ast.AnnAssign) -> list[Key]:
        """The key of one field, or the keys of the group that it is."""
        name, kind = ast.unparse(item.target), ast.unparse(item.annotation)
        value = item.value
        if isinstance(value, ast.Call):  # field(default=..., default_factory=...)
            value = value.keywords[0].value
            value = value.body if isinstance(value, ast.Lambda) else value
        if self.find(kind):
            own = {k.arg: spelled(k.value) for k in getattr(value, "keywords", ())}
            return [
                k._replace(name=f"{name}.{k.name}", default=own.get(k.name, k.default))
                for k in self.keys(kind)
            ]
        above = item.lineno
        while above - 1 in self.alone:
            above -= 1
        lines = range(above, (item.end_lineno or item.lineno) + 1)
        says = " ".join(self.beside[line] for line in lines if line in self.beside)
        return [Key(name, spelled(value) if value else None, says)]


@cache
def of_module(name: str) -> SourceFile:
    """The source of a module, which isn't imported."""
    return SourceFile(file_of(name))


def file_of(module: str) -> Path:
    """Where a module's source is."""
    found = importlib.util.find_spec(module)
    assert found and found.origin, module
    return Path(found.origin)


def spelled(value: ast.expr) -> str:
    """A default as the command line would say it."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    text = ast.unparse(value)
    return EMPTY.get(text, text)
