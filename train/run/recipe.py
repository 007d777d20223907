"""Recipes: a YAML and `key=value` arguments become one checked, typed configuration.

    config = load(DistillConfig, sys.argv[1:])      # recipe=quickstart/distill lr=1e-4

A configuration is an entry's dataclass: what is typed daily at its top, the rest in groups
(`text.max_length=512`), two levels at most. A plain value for a group is that of its first field:
`draft=my/model` says `draft.path=my/model`. `recipe=` names a file of the recipes folder, or is the
path of a YAML of your own; either may build on others (`defaults: [/quickstart/distill]`), as hydra
orders them. hydra's own `main` is not used, since it makes one output folder a process.
"""

from collections.abc import Collection
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import yaml
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

import draftsmith.recipes
from draftsmith.command import given, kinds, place, unknown
from draftsmith.train.run.folder import Run, flat

RECIPES = Path(draftsmith.recipes.__file__).resolve().parent
# What recipes for GSM8K train on and draft for, as `${gsm8k:target}` and `${gsm8k:data}`: the first
# that is there, else the last, which recipe=gsm8k/target makes and the hub has.
GSM8K = {
    "target": ("../shared/models/target-15m", "runs/gsm8k/target/model"),
    "data": ("../shared/data/gsm8k/train.jsonl", "runs/gsm8k/train.jsonl", "gsm8k"),
}
T = TypeVar("T")
Tree = dict[str, Any]


def gsm8k(what: str) -> str:
    """The `target` or the `data` of the recipes for GSM8K, seen from where this process runs."""
    return next(filter(Path.exists, map(Path, GSM8K[what])), Path(GSM8K[what][-1])).as_posix()


OmegaConf.register_new_resolver("gsm8k", gsm8k, replace=True)


def names() -> list[str]:
    """All recipes by name; the launcher configurations in `accelerate/` are none."""
    found = (path.relative_to(RECIPES).with_suffix("") for path in RECIPES.rglob("*.yaml"))
    return sorted(name.as_posix() for name in found if name.parts[0] != "accelerate")


def load(schema: type[T], argv: list[str]) -> T:
    """Compose `recipe=` and the other `key=value` arguments under `schema`: the entry's dataclass,
    whose field `entry` has the entry's name as default. ValueError: unknown recipe or key, wrong
    type, missing field, or another entry's recipe.
    """
    chosen = [arg.removeprefix("recipe=") for arg in argv if arg.startswith("recipe=")]
    overrides = given(schema, [arg for arg in argv if not arg.startswith("recipe=")])
    if len(chosen) > 1:
        raise ValueError(f"got {len(chosen)} recipes ({', '.join(chosen)}), expected one")
    config: Any = _structure(schema)
    known = kinds(schema)
    parts = _parts(chosen[0]) if chosen else []
    if chosen and (entry := _entry(parts)) != (ours := config.get("entry")):
        raise ValueError(f"recipe {chosen[0]!r} is for train/{entry}.py, this is {ours}.py")
    try:
        config = OmegaConf.merge(config, *(_opened(part, known) for part in parts))
    except ConfigKeyError as error:
        raise ValueError(unknown("key", str(error.full_key), known)) from error
    except OmegaConfBaseException as error:
        raise ValueError(f"{error}") from error
    for key, value in overrides.items():
        OmegaConf.update(config, key, value)
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        says = f"entry: {config.get('entry')}\n"
        ours = [name for name in names() if says in (RECIPES / f"{name}.yaml").read_text()]
        hint = "" if chosen else f", or choose a recipe: {', '.join(ours)}"
        raise ValueError(f"no value for {', '.join(missing)}: give {missing[0]}=...{hint}")
    return cast(T, OmegaConf.to_object(config))


def entry_of(name: str) -> str | None:
    """The entry that a recipe says it is for; ValueError where there is no such recipe."""
    return _entry(_parts(name))


def _entry(parts: list[Tree]) -> str | None:
    said: list[str | None] = [part["entry"] for part in parts if "entry" in part]
    return said[-1] if said else None


def show(config: Any, what: str = "all") -> str:
    """The resolved recipe as YAML; what: all of it, or the `changes` to the entry's defaults."""
    tree, usual = _plain(OmegaConf.structured(config)), _plain(_structure(type(config)))
    return OmegaConf.to_yaml(tree if what == "all" else _changes(tree, usual))


def check_made(config: Any) -> Any:
    """The same; ValueError, with the command, where a recipe reads what another makes, and that
    isn't there. A trial of a recipe reads nothing.
    """
    said = {} if config.target.shrink else flat(show(config))
    read = {key: str(v) for key, v in said.items() if key not in ("out", "cache.path")}
    lacking = [k for k, v in read.items() if v.startswith("runs/") and not Path(v).exists()]
    files = {name: (RECIPES / f"{name}.yaml").read_text() for name in names() if lacking}
    outs = {name: str(yaml.safe_load(text).get("out")) for name, text in files.items()}
    for key in sorted(lacking, key=lambda key: key != "target.path"):  # that first: others need it
        for name, out in outs.items():
            if Path(said[key]).is_relative_to(out) and out != config.out:
                entry = f"{'' if entry_of(name) == 'prepare' else 'train '}{entry_of(name)}"
                first = f"run first: draftsmith {entry} recipe={name}"
                raise ValueError(f"{key}: got {said[key]}, which isn't there; {first}")
    return config


def run_of(config: Any, *, main: bool) -> Run:
    """The run folder of a recipe; errors of `Run` pass."""
    defaults = OmegaConf.to_yaml(_structure(type(config)))
    return Run(config.out, show(config), main=main, defaults=defaults)


def _changes(tree: Tree, usual: Tree) -> Tree:
    nested = {
        name: _changes(value, usual[name])
        for name, value in tree.items()
        if isinstance(value, dict) and isinstance(usual[name], dict) and usual[name]
    }
    return {name: nested.get(name, value) for name, value in tree.items() if value != usual[name]}


def _structure(schema: type) -> DictConfig:
    """The schema with required groups opened, so that `target.path=...` finds its place."""
    structure = OmegaConf.structured(schema)
    for name, kind in get_type_hints(schema).items():
        if is_dataclass(kind) and OmegaConf.is_missing(structure, name):
            structure[name] = OmegaConf.structured(kind)
    return structure


def _plain(tree: Any) -> Tree:
    return cast(Tree, OmegaConf.to_container(tree))


def _opened(part: Tree, known: Collection[str]) -> Tree:
    """The same with what is said of a group as a whole said of its first field."""
    found = {}
    for name, value in part.items():
        _, _, field = place(name, known).partition(".")
        found[name] = {field: value} if field and not isinstance(value, dict) else value
    return found


def _locate(name: str) -> tuple[Path, str]:
    """The folder and the name in it of a recipe: one of ours, or a YAML file anywhere."""
    path = Path(name).resolve()
    ours = RECIPES / f"{name}.yaml" if name in names() else path
    if ours.is_relative_to(RECIPES) and ours.is_file():
        return RECIPES, ours.relative_to(RECIPES).with_suffix("").as_posix()
    if path.suffix == ".yaml" and path.is_file():
        return path.parent, path.stem
    raise ValueError(unknown("recipe", name, names()) + " (or a YAML's path)")


def _parts(name: str) -> list[Tree]:
    """A recipe's own part, after those of the recipes that it builds on."""
    folder, recipe = _locate(name)
    primary = {"defaults": [recipe, "_self_"], "hydra": {"searchpath": [f"file://{RECIPES}"]}}
    ConfigStore.instance().store(name="_primary", node=primary)
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(folder)):
            loader = GlobalHydra.instance().config_loader()
            order = loader.compute_defaults_list("_primary", [], RunMode.RUN).defaults
        built_of = [f"{one.config_path}.yaml" for one in order if not one.primary]
        places = [[folder / path, RECIPES / path] for path in built_of]
        # What hydra says of itself is in neither folder.
        files = [next(filter(Path.is_file, either), None) for either in places]
        parts = [OmegaConf.load(file) for file in files if file]
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ValueError(f"recipe {name!r}: {error} {error.__cause__ or ''}".strip()) from error
    if not all(isinstance(part, DictConfig) for part in parts):
        raise ValueError(f"recipe {name!r}: got a list, expected keys with values")
    return [{k: v for k, v in _plain(part).items() if k != "defaults"} for part in parts]
