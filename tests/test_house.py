"""The house keeps its rules, read from its source; each rule is shown to find what it forbids."""

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest
from house_rules import (
    OPTIONAL,
    ROOT,
    RULES,
    Files,
    fields,
    house,
    imported,
    parse,
    python,
    recipes_of,
)

PYPROJECT = '[tool.setuptools]\npackages = ["draftsmith"]\n[tool.setuptools.package-dir]\n'
PYPROJECT += 'draftsmith = "draftsmith"\n'
RECIPE = "# accelerate launch train/distill.py recipe=a/b\nentry: distill\n"
CONFIG = "@dataclass\nclass Config:\n    lr: float\n"
GROUPED = "@dataclass\nclass Text:\n    path: str\n@dataclass\nclass Config:\n    data: Text\n"
ENTRY = "@dataclass(kw_only=True)\nclass Config"
MIXED = f"{ENTRY.replace('Config', 'Settings')}:\n    lr: float\n"
MIXED += f"{ENTRY.replace('Config', 'Text')}:\n    path: str\n"
NESTED = "".join(
    f"{ENTRY.replace('Config', name)}:\n    a: {kind}\n"
    for name, kind in (("Inner", "str"), ("Text", "Inner"), ("Config", "Text"))
)
HANDED_ON = {
    "train/a.py": CONFIG,
    "train/b.py": "import draftsmith.train.a.Config, draftsmith.train.c",
    "train/c.py": "settings.lr",
}
CIRCLE = {
    "decode/x/a.py": "from draftsmith.decode.y.b import f",
    "decode/y/b.py": "import draftsmith.models.z.c",
    "models/z/c.py": "from draftsmith.decode.x import a",
}
BAD: list[tuple[str, Files]] = [
    ("import_directions", {"models/a.py": "from draftsmith.train.losses.pure import tv"}),
    ("import_directions", {"models/a.py": "def f():\n    import draftsmith.decode.verify.rules"}),
    ("import_directions", {"models/a.py": "import accelerate"}),
    ("import_directions", {"decode/a.py": "from draftsmith import train"}),
    ("import_directions", {"decode/a.py": "import_module('draftsmith.train.run.loop')"}),
    ("import_directions", {"train/eagle.py": "from draftsmith.train.distill import main"}),
    ("import_directions", {"train/run/loop.py": "import draftsmith.train.distill as d"}),
    (
        "import_directions",
        {"train/losses/pure.py": "from draftsmith.train.text.batches import Batch"},
    ),
    ("import_directions", {"train/losses/pure.py": "import numpy"}),
    ("import_directions", {"train/a.py": "from .losses import tv"}),
    ("import_directions", {"tests/a.py": "from models.target import load_target"}),
    ("import_directions", {"train/losses/b.py": "from draftsmith.decode.sampling import choose"}),
    ("cycles", CIRCLE),
    ("crowds", {f"decode/x/{name}.py": "" for name in "abcdefghijklmn"}),
    ("class_names", {"decode/a.py": "class A: ...", "models/x/b.py": "class A: ..."}),
    ("sizes", {"decode/a.py": "x = 1\n" * 401}),
    ("sizes", {"decode/a.py": "def f():\n    'doc'\n" + "    x = 1\n" * 61}),
    ("sizes", {"tests/a.py": "class A:\n    def f(self, a, b, c, d, e, /, f, *, g, h, i): ..."}),
    ("swallowing", {"decode/a.py": "try:\n    x\nexcept:\n    pass"}),
    ("swallowing", {"decode/a.py": "try:\n    x\nexcept Exception as e:\n    raise"}),
    ("swallowing", {"decode/a.py": "try:\n    x\nexcept (ValueError, Exception):\n    pass"}),
    ("swallowing", {"decode/a.py": "try:\n    x\nexcept BaseException:\n    pass"}),
    ("vague_names", {"train/utils.py": ""}),
    ("shadowing", {"train/omegaconf.py": ""}),
    ("shadowing", {"bench/types.py": ""}),
    ("shadowing", {"examples/queue.py": ""}),
    ("import_directions", {"examples/a.py": "from draftsmith.bench.rows import about_run"}),
    ("import_directions", {"decode/a.py": "from draftsmith import examples"}),
    ("shadowing", {"train/distill.py": "", "train/queue/a.py": ""}),
    ("dead_fields", {"train/a.py": CONFIG}),
    ("dead_fields", {"train/a.py": CONFIG + "config.lr = 3"}),
    ("dead_fields", {"train/a.py": CONFIG, "train/b.py": "other.lr"}),
    ("dead_fields", {"models/target.py": CONFIG.replace("dataclass", "dataclass(frozen=True)")}),
    ("dead_fields", {"train/a.py": GROUPED + "config.data\nother.path"}),
    (
        "config_shape",
        {"train/run/a.py": MIXED, "train/b.py": f"{ENTRY}(Settings, Text):\n    lr: int"},
    ),
    ("config_shape", {"train/run/a.py": MIXED + f"{ENTRY}2(Text):\n    lr: int\n"}),
    ("config_shape", {"train/a.py": NESTED}),
    ("recipe_files", {"recipes/a/b.yaml": RECIPE}),
    ("recipe_files", {"recipes/a/b.yaml": RECIPE + "\n" * 40, "train/distill.py": ""}),
    ("recipe_files", {"recipes/a/c.yaml": RECIPE, "train/distill.py": ""}),
    ("packages", {"pyproject.toml": PYPROJECT, "models/x/a.py": ""}),
    ("packages", {"pyproject.toml": PYPROJECT.replace('h"]', 'h", "draftsmith.models"]')}),
]
GOOD: list[tuple[str, Files]] = [
    ("cycles", {**CIRCLE, "models/z/c.py": "from draftsmith.models.w.d import g"}),
    ("crowds", {f"decode/x/{name}.py": "" for name in "abcdefghijklm"}),
    ("class_names", {"decode/a.py": "class A: ...", "tests/b.py": "class A: ..."}),
    ("sizes", {"decode/a.py": "def f():\n    'doc'\n" + "    x = 1\n" * 60}),
    ("swallowing", {"decode/a.py": "try:\n    x\nexcept BaseException:\n    y\n    raise"}),
    ("dead_fields", {"train/a.py": CONFIG, "train/b.py": "import draftsmith.train.a.Config\nc.lr"}),
    ("dead_fields", HANDED_ON),
    ("dead_fields", {"train/a.py": GROUPED + "text = config.data\nf(text.path)"}),
    ("dead_fields", {"train/a.py": GROUPED + "def f(x: Text, config):\n    config.data, x.path"}),
    (
        "config_shape",
        {"train/run/a.py": MIXED, "train/b.py": f"{ENTRY}(Settings):\n    text: Text"},
    ),
    ("recipe_files", {"recipes/a/b.yaml": RECIPE, "train/distill.py": ""}),
    ("packages", {"pyproject.toml": PYPROJECT, "draftsmith/a.py": "", "tests/a.py": ""}),
]


@pytest.fixture(scope="module", autouse=True)
def few_collections() -> Iterator[None]:
    """The trees of all files are kept meanwhile, and needn't be looked through again and again."""
    gc.disable()
    yield
    parse.cache_clear()
    imported.cache_clear()
    gc.enable()


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps_the_rule(rule: str) -> None:
    complaints = RULES[rule](house())
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(("rule", "files"), BAD)
def test_the_rule_finds_what_it_forbids(rule: str, files: Files) -> None:
    assert len(RULES[rule](files)) == 1


@pytest.mark.parametrize(("rule", "files"), GOOD)
def test_the_rule_allows_the_rest(rule: str, files: Files) -> None:
    assert not RULES[rule](files)


def test_there_is_something_to_check() -> None:
    files = house()
    for room in ("draftsmith", "models", "decode", "train", "tests"):
        assert len(list(python(files, room))) > 1, room
    assert recipes_of(files) and len(list(fields(files))) > 3
    assert {rule for rule, _ in BAD} == RULES.keys()


IMPORT_WITHOUT = """
import importlib, sys
hidden, modules = sys.argv[1].split(), sys.argv[2:]

class Without:
    def __init__(self, finder): self.finder = finder
    def __getattr__(self, name): return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in hidden else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
for name in modules:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
"""


def test_core_imports_without_the_optional_packages() -> None:
    """Models, decode, losses and loop work without omegaconf, datasets, deepspeed and wandb."""
    paths = [path for path, _ in python(house(), "models", "decode")]
    paths += [
        path for path in ("train/losses/pure.py", "train/run/loop.py") if (ROOT / path).exists()
    ]
    assert len(paths) > 5
    modules = ["draftsmith." + path.removesuffix(".py").replace("/", ".") for path in paths]
    # The optional packages themselves come last, and must fail: the hiding works.
    command = [sys.executable, "-c", IMPORT_WITHOUT, " ".join(OPTIONAL), *modules, *OPTIONAL]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
    assert [line.split(":")[0] for line in run.stdout.splitlines()] == list(OPTIONAL), run.stdout
