"""Which recipes may go on in a run's folder."""

from pathlib import Path

import pytest

from draftsmith.train.run.folder import Run


def test_a_run_of_before_a_key_went_goes_on(tmp_path: Path) -> None:
    """Where the key was as nobody sets it."""

    def opened(recipe: str) -> Run:
        return Run(tmp_path, recipe, main=True)

    run = opened("head:\n  freeze_head: false\n  K: 2\n")
    run.staging(3).mkdir()
    run.commit(3)
    assert opened("head:\n  K: 2\n").latest() is not None
    run.folder.joinpath("recipe.yaml").write_text("head:\n  freeze_head: true\n  K: 2\n")
    with pytest.raises(ValueError, match=r"head.freeze_head: True there, absent now"):
        opened("head:\n  K: 2\n")


def test_another_recipe_is_refused_once_there_is_something_to_lose(tmp_path: Path) -> None:
    def opened(lr: float, track: str, path: str) -> Run:
        return Run(tmp_path, f"lr: {lr}\ntrack: {track}\ntarget:\n  path: {path}\n", main=True)

    (opened(0.1, "none", "a").cache / "answers").touch()
    run = opened(0.2, "none", "a")
    assert not list(run.cache.iterdir()), "made by another recipe"
    run.staging(3).mkdir()
    run.commit(3)
    opened(0.2, "wandb", "a")
    with pytest.raises(ValueError, match=r"lr: 0.2 there, 0.3 now; target.path: a there, b now"):
        opened(0.3, "none", "b")
