"""A wheel or sdist knows the commit that it was made from: draftsmith/COMMIT in it."""

from pathlib import Path
from subprocess import CalledProcessError, check_output

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist


def write_commit(tree: str) -> None:
    """Into the package below `tree`; an sdist is no repository, and carries its file along."""
    try:
        top, commit = check_output(
            ["git", "rev-parse", "--show-toplevel", "HEAD"], text=True, cwd=Path(__file__).parent
        ).split()
    except (OSError, CalledProcessError):
        return
    if Path(top) == Path(__file__).resolve().parent:
        Path(tree, "draftsmith", "COMMIT").write_text(f"{commit}\n")


class BuildWithCommit(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_commit(self.build_lib)


class SdistWithCommit(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)


setup(cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit})
