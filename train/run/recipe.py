"""Recipes: a YAML and `key=value` arguments become one checked, typed configuration.

    config = load(DistillConfig, sys.argv[1:])      # recipe=quickstart/distill lr=1e-4

`recipe=` names a file of the recipes folder, or is the path of a YAML of your own (which may build
on ours: `defaults: [/quickstart/distill, _self_]`). hydra composes it under the entry's dataclass;
hydra's own `main` is not used, since it makes one output folder a process.
"""

import re
from collections.abc import Collection
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import draftsmith.recipes
from draftsmith.command import given, kinds, unknown
from draftsmith.train.run.folder import Run

RECIPES = Path(draftsmith.recipes.__file__).resolve().parent
T = TypeVar("T")


def names() -> list[str]:
    """All recipes by name; the launcher configurations in `accelerate/` are none."""
    found = (path.relative_to(RECIPES).with_suffix("") for path in RECIPES.rglob("*.yaml"))
    return sorted(name.as_posix() for name in found if name.parts[0] != "accelerate")


def load(schema: type[T], argv: list[str]) -> T:
    """Compose `recipe=` and the other `key=value` arguments under `schema`.

    Args:
        schema: the entry's dataclass; its field `entry` has the entry's name as default.
        argv: the arguments after the script's name.

    Raises:
        ValueError: unknown recipe or key, wrong type, missing field, or another entry's recipe.
    """
    chosen = [arg.removeprefix("recipe=") for arg in argv if arg.startswith("recipe=")]
    overrides = given(schema, [arg for arg in argv if not arg.startswith("recipe=")])
    if len(chosen) > 1:
        raise ValueError(f"got {len(chosen)} recipes ({', '.join(chosen)}), expected one")
    structure = _structure(schema)
    folder, parts = RECIPES, ["_schema"]
    if chosen:
        folder, recipe = _locate(chosen[0])
        entry, ours = entry_of(chosen[0]), structure.get("entry")
        if entry != ours:
            raise ValueError(f"recipe {chosen[0]!r} is for train/{entry}.py, this is {ours}.py")
        parts.append(recipe)
    ConfigStore.instance().store(name="_schema", node=structure)
    config = _compose(folder, parts, known=kinds(schema))
    for key, value in overrides.items():
        OmegaConf.update(config, key, value)
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        hint = "" if chosen else f", or choose a recipe: {', '.join(names())}"
        raise ValueError(f"no value for {', '.join(missing)}: give {missing[0]}=...{hint}")
    result: Any = OmegaConf.to_object(config)
    return result


def entry_of(name: str) -> str | None:
    """The entry that a recipe says it is for; ValueError where there is no such recipe."""
    folder, found = _locate(name)
    entry: str | None = _compose(folder, [found]).get("entry")
    return entry


def show(config: Any) -> str:
    """The resolved recipe as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def run_of(config: Any, *, main: bool) -> Run:
    """The run folder of a recipe; errors of `Run` pass."""
    defaults = OmegaConf.to_yaml(_structure(type(config)))
    return Run(config.out, show(config), main=main, defaults=defaults)


def _structure(schema: type) -> DictConfig:
    """The schema with nested dataclasses opened, so that `target.path=...` finds its place."""
    structure = OmegaConf.structured(schema)
    for name, kind in get_type_hints(schema).items():
        if is_dataclass(kind) and OmegaConf.is_missing(structure, name):
            structure[name] = OmegaConf.structured(kind)
    return structure


def _locate(name: str) -> tuple[Path, str]:
    """The folder and the name in it of a recipe: one of ours, or a YAML file anywhere."""
    path = Path(name).resolve()
    ours = RECIPES / f"{name}.yaml" if name in names() else path
    if ours.is_relative_to(RECIPES) and ours.is_file():
        return RECIPES, ours.relative_to(RECIPES).with_suffix("").as_posix()
    if path.suffix == ".yaml" and path.is_file():
        return path.parent, path.stem
    raise ValueError(unknown("recipe", name, names()) + " (or a YAML's path)")


def _compose(folder: Path, parts: list[str], known: Collection[str] = ()) -> DictConfig:
    primary = {"defaults": [*parts, "_self_"], "hydra": {"searchpath": [f"file://{RECIPES}"]}}
    ConfigStore.instance().store(name="_primary", node=primary)
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(folder)):
            return compose("_primary")
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        found = re.search(r"full_key: (\S+)", f"{error}")
        if found and "ConfigKeyError" in f"{error}":
            raise ValueError(unknown("key", found[1], known)) from error
        raise ValueError(f"{error}\n{error.__cause__ or ''}".strip()) from error
