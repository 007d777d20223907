"""Recipes: what composes, and what each mistake is told."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from forked import run

from draftsmith.train.run import recipe


@dataclass
class Where:
    path: str
    shrink: bool = False


@dataclass(kw_only=True)
class Common:
    steps: int
    lr: float = 1e-3


@dataclass(kw_only=True)
class Config(Common):
    entry: str = "distill"
    target: Where
    out: str = "runs/x"
    names: list[str] | None = None


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "recipes"
    files = {
        "some/base": "entry: distill\nsteps: 3\nlr: 0.5\ntarget:\n  path: a/b\n",
        "some/child": "defaults: [/some/base, _self_]\nlr: 0.25\n",
        "some/plain": "defaults: [/some/base]\ntarget: x\n",
        "some/list": "- entry\n",
        "some/heads": "entry: heads\nsteps: 3\n",
        "some/typo": "entry: distill\nstepz: 3\n",
        "some/nested_typo": "entry: distill\ntarget:\n  pth: a\n",
        "some/wrong_type": "entry: distill\nsteps: many\n",
        "some/broken": "entry: distill\nsteps: [1\n",
        "accelerate/cpu": "num_processes: 1\n",
    }
    for name, text in files.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# @package _global_\n{text}")
    monkeypatch.setattr(recipe, "RECIPES", folder)
    return folder


def test_a_setting_that_is_newer_than_its_run_counts_as_its_default(
    recipes: Path, tmp_path: Path
) -> None:
    config = recipe.load(Config, ["recipe=some/base", f"out={tmp_path / 'run'}"])
    run = recipe.run_of(config, main=True)
    run.finish({"steps": 3})
    stored = run.folder / "recipe.yaml"
    older = yaml.safe_load(stored.read_text())
    del older["names"], older["target"]["shrink"]
    stored.write_text(yaml.safe_dump(older))
    assert recipe.run_of(config, main=True).finished() == {"steps": 3}
    config.target.shrink, config.names = True, ["a"]
    with pytest.raises(
        ValueError, match=r"names: None there, \['a'\] now; target.shrink: False there"
    ):
        recipe.run_of(config, main=True)


def test_recipe_then_arguments(recipes: Path) -> None:
    config = recipe.load(Config, ["recipe=some/base", "lr=1e-4", "target.shrink=true"])
    assert config == Config(steps=3, lr=1e-4, target=Where("a/b", shrink=True))
    assert isinstance(config.target, Where)


def test_a_recipe_builds_on_another(recipes: Path) -> None:
    assert recipe.load(Config, ["recipe=some/child"]).lr == 0.25
    assert recipe.load(Config, ["recipe=some/child"]).steps == 3


def test_a_yaml_of_ones_own(recipes: Path, tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text("defaults: [/some/base, _self_]\nsteps: 7\n")
    config = recipe.load(Config, [f"recipe={own}", "lr=0.1"])
    assert (config.steps, config.lr, config.target.path) == (7, 0.1, "a/b")
    inside = recipe.load(Config, [f"recipe={recipes / 'some/base.yaml'}"])
    assert inside == recipe.load(Config, ["recipe=some/base"])


def test_arguments_alone(recipes: Path) -> None:
    config = recipe.load(Config, ["steps=2", "target.path=x", "out=a folder", "names=[a,b]"])
    assert config == Config(steps=2, target=Where("x"), out="a folder", names=["a", "b"])


def test_a_plain_value_for_a_group_is_its_first_field_s(recipes: Path) -> None:
    wanted = Config(steps=3, lr=0.5, target=Where("x", shrink=True))
    for given in (["target=x", "target.shrink=true"], ["target={path: x, shrink: true}"]):
        assert recipe.load(Config, ["recipe=some/base", *given]) == wanted
    assert recipe.load(Config, ["recipe=some/plain", "target.shrink=true"]) == wanted
    own = recipes / "own.yaml"
    own.write_text("defaults: [/some/plain]\ntarget: {shrink: true}\n")
    assert recipe.load(Config, [f"recipe={own}"]) == wanted


def test_what_a_run_prints_is_what_it_changes(recipes: Path, tmp_path: Path) -> None:
    config = recipe.load(Config, ["recipe=some/plain", "lr=1e-3", "names=[a]"])
    changes = {"steps": 3, "target": {"path": "x"}, "names": ["a"]}
    assert yaml.safe_load(recipe.show(config, "changes")) == changes
    again = tmp_path / "again.yaml"
    again.write_text(f"entry: distill\n{recipe.show(config, 'changes')}")
    assert recipe.load(Config, [f"recipe={again}"]) == config


def test_show_is_what_load_reads(recipes: Path, tmp_path: Path) -> None:
    config = recipe.load(Config, ["recipe=some/base", "lr=3e-5"])
    shown = yaml.safe_load(recipe.show(config))
    assert shown["target"] == {"path": "a/b", "shrink": False}
    again = tmp_path / "again.yaml"
    again.write_text(recipe.show(config))
    assert recipe.load(Config, [f"recipe={again}"]) == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe=some/bas"], "did you mean some/base?"),
        (["recipe=zzz"], "there are some/base, some/broken"),
        (["recipe=accelerate/cpu"], "unknown recipe 'accelerate/cpu'"),
        (["recipe=some/heads"], r"is for train/heads.py, this is distill.py"),
        (["recipe=some/base", "recipe=some/child"], "got 2 recipes"),
        (["recipe=some/base", "+lr=1"], r"unknown key '\+lr': did you mean lr?"),
        (["recipe=some/base", "lr"], "argument 'lr': got no value"),
        (["recipe=some/base", "hydra.run.dir=x"], "unknown key 'hydra.run.dir'"),
        (["recipe=some/base", "lrr=1"], "unknown key 'lrr': did you mean lr?"),
        (["recipe=some/base", "target.pth=1"], "did you mean target.path?"),
        (["recipe=some/base", "qqqqqqq=1"], "unknown key 'qqqqqqq': there are steps, lr"),
        (["recipe=some/base", "lr=fast"], "lr: got 'fast', expected float"),
        (["recipe=some/base", "steps=2.5"], "steps: got '2.5', expected int"),
        (["recipe=some/base", "lr=1,2"], "lr: got '1,2', expected float"),
        (["recipe=some/base", "names=[a"], "names: got '\\[a', expected a list"),
        (["recipe=some/base", "path=1"], "unknown key 'path': did you mean target.path?"),
        (["recipe=some/base", "target.steps=1"], "unknown key 'target.steps': did you mean steps?"),
        (["recipe=some/list"], "got a list, expected keys with values"),
        (["recipe=some/typo"], "unknown key 'stepz': did you mean steps?"),
        (["recipe=some/nested_typo"], "unknown key 'target.pth': did you mean target.path?"),
        (["recipe=some/wrong_type"], "'many' of type 'str' could not be converted to Integer"),
        (["recipe=some/broken"], "while parsing a flow sequence"),
        (["steps=2"], "no value for target.path: give target.path=..., or choose a recipe"),
    ],
)
def test_mistakes(recipes: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe.load(Config, arguments)


def test_recipes_are_found_from_anywhere(tmp_path: Path) -> None:
    code = "from draftsmith.train.run import recipe; print(recipe.names())"
    done = run(["-c", code], cwd=tmp_path)
    assert "quickstart/distill" in done.out, done.err
    assert "accelerate" not in done.out
