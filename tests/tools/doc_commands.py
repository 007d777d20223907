"""Whether a command that stands on a page is one: each word goes through the program's own parser.

Nothing is run and no model is opened. A command may be cut short (`...`): what is left is checked.
"""

import ast
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from accelerate.commands.launch import launch_command_parser
from house_rules import ROOT

from draftsmith.__main__ import COMMANDS, LAUNCHED
from draftsmith.command import given, parse, parted, spelled
from draftsmith.decode.drafters.load import BARE, OMNI, OVER, STORED, UNTRAINED
from draftsmith.decode.engine.settings import DecodeSettings
from draftsmith.launch import CONFIGS, Launch
from draftsmith.train.plan.table import PlanRequest
from draftsmith.train.run.recipe import entry_of, load

ENTRIES = {place.partition(".")[2]: name for name, (place, *_) in COMMANDS.items()}
ENDS = ("&&", "|", ";", ">", ">>", "2>&1")


def fault(line: str, *, cut: bool = False) -> str:
    """What is wrong with a command line, by its parser's own words; empty where nothing is. cut: it
    needn't say all that must be given.
    """
    line += " ..." * cut
    try:
        words = shlex.split(line, comments=True)
        for end, part in groupby(words, ENDS.__contains__):
            if not end:
                one_command(list(part))
    except (ValueError, OSError, SyntaxError) as error:
        return f"{line}: {error}"
    except SystemExit:  # argparse
        return f"{line}: accelerate doesn't take it"
    return ""


def one_command(words: list[str]) -> None:
    """ValueError where a program of ours doesn't take its words; others pass."""
    if words[:3] == ["python", "-m", "draftsmith"]:
        words = words[2:]
    program, *rest = words
    if program == "draftsmith":
        ours(rest)
    elif program == "python" and rest and rest[0].endswith(".py"):
        script(rest[0], rest[1:])
    elif words[:2] == ["accelerate", "launch"] and words[2:] != ["..."]:
        launched = launch_command_parser().parse_args(rest[1:])
        if launched.config_file:
            exists(launched.config_file)
        script(launched.training_script, launched.training_script_args)
    elif program == "make":
        made(rest)
    elif program == "pip":
        extras(rest)


def exists(path: str) -> None:
    if not (ROOT / path).exists():
        raise ValueError(f"there is no {path}")


def ours(words: list[str]) -> None:
    """A command of the table, with its keys."""
    if words[0] in ("--help", "--version") or {*words} <= {"train", "..."}:
        return
    name = next((name for name in COMMANDS if words[: len(name.split())] == name.split()), None)
    if name is None:
        raise ValueError(f"unknown command {' '.join(words[:2])}")
    place, schema, _ = COMMANDS[name]
    argv = spelled(words[len(name.split()) :])
    if argv[:1] == ["help=true"]:
        return
    if name.startswith(LAUNCHED):
        launch, argv = parted(Launch, argv)
        if launch.config and launch.config not in {p.stem for p in CONFIGS.glob("*.yaml")}:
            raise ValueError(f"unknown config {launch.config}")
    if name == "plan":
        argv = parted(PlanRequest, argv)[1]
        recipe = [word for word in argv if word.startswith("recipe=")]
        if not recipe or "..." in recipe[0]:
            return
        place, schema, _ = COMMANDS[ENTRIES[str(entry_of(recipe[0].removeprefix("recipe=")))]]
    config = getattr(importlib.import_module(f"draftsmith.{place}"), schema)
    taken(config, argv, recipes=place.startswith("train.") and "entry" in fields(config))


def fields(config: Any) -> set[str]:
    return set(config.__dataclass_fields__)


def taken(config: Any, argv: list[str], *, recipes: bool) -> None:
    """ValueError where a configuration doesn't take these arguments, or a decoder their values."""
    first = "drafter" if config.__name__ == "Doctor" else ""
    whole = not any("..." in word for word in argv)
    argv = [word for word in argv if "..." not in word]
    said = [word for word in argv if not word.startswith("recipe=")]
    if recipes and len(said) < len(argv):
        entry = entry_of(argv[[a in said for a in argv].index(False)].removeprefix("recipe="))
        if entry != config.__dataclass_fields__["entry"].default:
            raise ValueError(f"the recipe is for {entry}")
    if not whole:
        given(config, [word for word in said if "=" in word])
    elif recipes:
        load(config, argv)
    else:
        given(config, argv if first == "" else [])
        # What `save` asks is that the folder is there.
        parse(config, [word for word in argv if not word.startswith("save=")], first=first)
    found = dict(word.split("=", 1) for word in said if "=" in word)
    how = {key: found[key] for key in ("policy", "rule", "lossy") if found.get(key)}
    if (tree := found.get("tree")) and not tree.endswith(".json"):
        how["tree"] = tree
    DecodeSettings(allow_lossy=bool(how.get("lossy")), **how)  # type: ignore[arg-type]
    for drafter in found.get("drafter", "").split(","):
        kind, colon, _ = drafter.partition("+")[0].partition(":")
        if colon and kind not in (*UNTRAINED, OMNI):
            raise ValueError(f"unknown drafter {drafter}: there are {', '.join(UNTRAINED)}")
        if "+" in drafter and kind not in (*STORED, *OVER, "skip", "exits"):
            raise ValueError(f"unknown drafter {drafter}: {kind} goes before no other")
        if re.fullmatch(r"[a-z]+", drafter) and drafter not in BARE:
            raise ValueError(f"unknown drafter {drafter}: there are {', '.join(BARE)}")


def script(path: str, argv: list[str]) -> None:
    """A script of ours and its keys; of one without `run_command` only that it is there."""
    exists(path)
    module = path.removesuffix(".py").replace("/", ".")
    if path.startswith("train/"):
        ours([*ENTRIES[module.removeprefix("train.")].split(), *argv])
    elif (schema := settings_of(ROOT / path)) and path.startswith("bench/"):
        config = getattr(importlib.import_module(f"draftsmith.{module}"), schema)
        taken(config, spelled(argv), recipes=False)


@cache
def settings_of(path: Path) -> str:
    """The class that a script gives to `run_command`; "" where it doesn't."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "run_command":
            return ast.unparse(node.args[1])
    return ""


def made(words: list[str]) -> None:
    """Targets and variables of the Makefile."""
    text = (ROOT / "Makefile").read_text("utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    for word in filter("...".__ne__, words):
        name, equals, _ = word.partition("=")
        if equals and f"$({name})" not in text and not re.search(rf"^{name}\b", text, re.M):
            raise ValueError(f"the Makefile reads no {name}")
        if not equals and word not in phony.split():
            raise ValueError(f"make has no {word}")


def extras(words: list[str]) -> None:
    """Extras of the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for names in re.findall(r"(?:\.|draftsmith)\[([\w,]+)\]", " ".join(words)):
        if lacking := set(names.split(",")) - set(project["optional-dependencies"]):
            raise ValueError(f"there is no extra {', '.join(lacking)}")


def spans(text: str) -> Iterator[str]:
    """Commands in running text, between backticks; those with words in capitals for a name, or with
    parts in brackets, are none.
    """
    for span in re.findall(r"(?<!`)`((?:draftsmith|python|make|accelerate|pip) [^`]+)`(?!`)", text):
        if not re.search(r"^draftsmith (train )?[A-Z]|\[[a-z]+=|[<>]|\bX\b", span):
            yield span
