"""The command line: how it is spelled, what mistakes are told, what it says of itself, launches."""

import dataclasses
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from house_rules import ROOT

import draftsmith
import draftsmith.__main__ as front
from draftsmith.__main__ import COMMANDS, listing
from draftsmith.command import LESS, given, guarded, kinds, parse, spelled
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.policies.choice import POLICIES
from draftsmith.decode.verify.rules import RULES
from draftsmith.manual import COMMON, SourceFile


@dataclass
class Spot:
    path: str
    dtype: str = "auto"


@dataclass
class Command:
    target: Spot
    out: str = "runs/x"
    K: int | None = 4  # draft calls
    max_new_tokens: int = 8
    # of words
    rate: float = 0.5
    loud: bool = False
    stop: tuple[str, ...] = ()
    taps: list[int] = field(default_factory=list)
    mix: dict[str, float] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)


def read(*argv: str) -> Command:
    return parse(Command, spelled(list(argv)))


def test_three_spellings_are_one() -> None:
    one = read("target.path=a", "max_new_tokens=3", "loud=true", "out=a=b")
    assert one == Command(Spot("a"), max_new_tokens=3, loud=True, out="a=b")
    assert one == read("--target.path", "a", "--max-new-tokens=3", "--loud", "--out", "a=b")
    assert one == read("target=a", "--max_new_tokens", "3", "--out", "a=b", "--loud")


def test_text_becomes_what_the_field_is() -> None:
    got = read("target=a", "K=none", "rate=1e-3", "stop=END", "taps=[1, 2]", "mix={fkl:1,tv:.5}")
    assert (got.K, got.rate, got.stop, got.taps) == (None, 1e-3, ("END",), [1, 2])
    assert got.mix == {"fkl": 1.0, "tv": 0.5}
    assert read("target=001").target.path == "001"  # a text stays as it was written
    assert read("target=a", 'stop=["\\n", "Q: "]').stop == ("\n", "Q: ")
    assert read("target=a", "taps=", "stop=[]") == Command(Spot("a"))
    assert given(Command, ["target=a"]) == {"target.path": "a"}


@pytest.mark.parametrize(
    ("table", "is_read"),
    [
        ('{url:"http://localhost:8000",model:x}', {"url": "http://localhost:8000", "model": "x"}),
        ("{url: http://localhost:8000}", {"url": "http://localhost:8000"}),
        ("{url:http://a:1, b: it's,c:'d,e:f'}", {"url": "http://a:1", "b": "it's", "c": "d,e:f"}),
        ('{eagle3:"data=a:b"}', {"eagle3": "data=a:b"}),
        ('{"a:b": c,d:e:f}', {"a:b": "c", "d": "e:f"}),
        ("{a b:1,c:2}", {"a b": "1", "c": "2"}),
        ("a:1", {"a": "1"}),
    ],
)
def test_a_colon_in_a_value_stays_as_it_is(table: str, is_read: dict[str, str]) -> None:
    assert read("target=a", f"words={table}").words == is_read


def test_tables_within_tables_need_no_spaces() -> None:
    @dataclass
    class Outer:
        inner: Command

    [key, *_] = found = given(Outer, ["inner={target:{path:a:b},K:2,stop:[x:y,z]}"])
    assert key == "inner.target.path" and [*found.values()] == ["a:b", 2, ("x:y", "z")]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("target=a max_new_token=3", "unknown key 'max_new_token': did you mean max_new_tokens?"),
        ("target.pth=a", "did you mean target.path?"),
        ("target=a qqq=1", "unknown key 'qqq': there are target.path, target.dtype, out"),
        ("out=b target.dtype=x", "missing: target.path=..."),
        ("out=b", "missing: target.path=..."),
        ("target=a K=four", "K: got 'four', expected int"),
        ("target=a loud=yes", "loud: got 'yes', expected true or false"),
        ("target=a taps=[1", "taps: got '[1', expected a list such as"),
        ("target=a taps=[1,x]", "taps: got 'x', expected int"),
        (
            "target=a taps=[[1,2]]",
            "taps: got ['1', '2'] within a list or table, expected one value",
        ),
        ("target=a mix={a:{b:1}}", "mix: got {'b': '1'} within a list or table, expected one"),
        ("target=a mix=3", "mix: got '3', expected a dict such as {one:1,other:2}"),
        ("target=a K", "argument 'K': got no value, expected K=..."),
    ],
)
def test_a_mistake_is_named_with_what_is_right(argv: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(*argv.split())
    assert str(caught.value).startswith(says) or says in str(caught.value)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_has_a_word_of_its_own_for_what_has_one(name: str) -> None:
    """The keys of docs/glossary.md."""
    place, schema, _ = COMMANDS[name]
    keys = kinds(getattr(importlib.import_module(f"draftsmith.{place}"), schema))
    others = "batch drafts fit folder max_len max_tokens part precision prompt_length rows"
    assert not {key.rpartition(".")[2] for key in keys} & {*others.split()}


def test_a_first_value_may_be_spelled_like_a_key() -> None:
    """A folder that is called as its key is; only `=` makes a word a key."""
    for words in (["out"], ["rate", "loud=true"], ["a/K=3"]):
        assert parse(Command, [*words, "target=a"], first="out").out == words[0]
    assert parse(Command, ["out=b", "target=a"], first="out").out == "b"
    with pytest.raises(ValueError, match="argument 'K': got no value, expected K="):
        parse(Command, ["b", "target=a", "K"], first="out")


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def ends(error: BaseException | None) -> int:
        def main(argv: list[str]) -> None:
            if error:
                raise error

        return guarded(main, [])

    assert ends(None) == 0 and guarded(lambda argv: 1, []) == 1
    assert ends(ValueError("got a,\n  expected b")) == 2
    assert capsys.readouterr().err.startswith("error: got a, expected b")
    assert ends(FileNotFoundError("no file x")) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert ends(KeyboardInterrupt()) == ends(KeyboardInterrupt("repeat it")) == 130
    assert capsys.readouterr() == ("", "interrupted\ninterrupted: repeat it\n")
    with pytest.raises(KeyError):  # ours: with a traceback
        ends(KeyError("x"))
    assert guarded(lambda argv: json.loads("{"), []) == 2
    assert "(json.decoder:" in capsys.readouterr().err  # where an error of another library is from


ON_CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.25 GiB is free. Process 9 has 77 GiB memory in use."
)


@pytest.mark.parametrize(
    ("error", "got"),
    [
        (
            torch.OutOfMemoryError(ON_CUDA),
            "20.00 MiB to allocate where 1.25 GiB of the GPU's 79",
        ),
        (
            None,
            r"4,194,304.00 GiB to allocate where [\d,.]+ of this machine's [\d,.]+ GiB are free",
        ),
        (MemoryError(), r"more to allocate where [\d,.]+ of this"),
        (RuntimeError("CUDA error: out of memory"), "more to allocate"),
    ],
)
@pytest.mark.parametrize(
    ("name", "helps", "not_here"),
    [
        ("train distill", ("a smaller batch_size", "gradient_check", "text.max_length"), "rows"),
        ("evaluate", ("a smaller batch", "max_new_tokens", "dtype=bfloat16"), "accumulation"),
        ("serve", ("a smaller batch_size", "a shorter max_length", "dtype="), "text.max_length"),
    ],
)
def test_a_lack_of_memory_is_one_line(
    error: RuntimeError | None,
    got: str,
    name: str,
    helps: tuple[str, ...],
    not_here: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main(*_: object) -> None:
        if error:
            raise error
        torch.empty(1 << 52, dtype=torch.uint8)

    monkeypatch.setattr(front, "command", main)
    monkeypatch.setattr(sys, "argv", ["draftsmith", *name.split()])
    assert front.main() == 1
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(f"error: out of memory: got {got}", line) and "Traceback" not in line
    expected = line.partition("expected less: ")[2]
    assert all(help in expected for help in helps) and not_here not in expected


def test_other_errors_of_torch_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError, match="size"):
        guarded(lambda _: int(torch.ones(2) @ torch.ones(3)), [])


def test_every_key_that_saves_memory_is_some_commands() -> None:
    assert set(LESS) <= {key for name in COMMANDS for key in front.keys_of(name)}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_manual_lists_the_keys_that_are_taken(name: str) -> None:
    place, schema, _ = COMMANDS[name]
    module = importlib.import_module(f"draftsmith.{place}")
    assert callable(module.main)
    config = getattr(module, schema)
    keys = {key.name: key.default for key in SourceFile(Path(str(module.__file__))).keys(schema)}
    assert list(keys) == list(kinds(config))
    for one in dataclasses.fields(config):
        if one.name in keys and isinstance(one.default, int | float | str):
            assert given(config, [f"{one.name}={keys[one.name]}"]) == {one.name: one.default}
        elif one.default is one.default_factory is dataclasses.MISSING:
            assert keys.get(one.name) is None


def test_a_manual_says_what_the_source_says() -> None:
    keys = {key.name: key for key in SourceFile(Path(__file__)).keys("Command")}
    assert keys["target.path"].default is None and keys["target.dtype"].default == "auto"
    assert (keys["K"].default, keys["K"].says) == ("4", "draft calls")
    assert keys["rate"].says == "of words" and not keys["loud"].says
    assert COMMON["rule"].split(" | ") == [*RULES]
    assert COMMON["policy"].partition(": ")[2].split(" | ") == [*POLICIES]
    assert (keys["stop"].default, keys["taps"].default, keys["loud"].default) == (
        "[]",
        "[]",
        "false",
    )


MANUALS = """
import sys
from draftsmith.__main__ import COMMANDS, main
named = ([*name.split(), "--help"] for name in COMMANDS)
for argv in (["--version"], [], ["help"], ["train", "--help"], *named):
    sys.argv[1:] = argv
    assert main() == 0
import draftsmith
print({"torch", "transformers", "omegaconf", "rich"} & sys.modules.keys(), file=sys.stderr)
"""


def test_manuals_import_no_library() -> None:
    run = subprocess.run([sys.executable, "-c", MANUALS], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "set()\n")
    for words in ("draftsmith 0.", "train distill ", "target.path=...", "Exit codes: 0 done"):
        assert words in run.stdout
    assert "train eagle" in listing("train ") and "evaluate" not in listing("train ")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("evalute target=a", "did you mean evaluate?"),
        ("train distil recipe=a", "did you mean train distill?"),
        ("train", "there are train pretrain, train distill"),
        ("train eagle --config zero9", "unknown config 'zero9': did you mean zero"),
    ],
)
def test_a_command_that_there_is_not(argv: str, says: str) -> None:
    command = [sys.executable, "-m", "draftsmith", *argv.split()]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("error: unknown ") and says in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel holds, unpacked, with an entry that needs no library, and no checkout beside."""
    site = tmp_path_factory.mktemp("site")
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package, folder in folders["package-dir"].items():
        goal = site / package.replace(".", "/")
        shutil.copytree(ROOT / folder, goal, ignore=shutil.ignore_patterns("__pycache__"))
    (site / "draftsmith/train/entry.py").write_text(
        "import os, signal\n"
        "from dataclasses import dataclass\n"
        "from draftsmith.command import parse, run_command\n"
        "@dataclass\n"
        "class Config:\n"
        "    how: str\n"
        "def main(argv):\n"
        "    how, rank = parse(Config, argv).how, os.environ.get('RANK', 'none')\n"
        "    if how == 'killed':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    if how != 'well':\n"
        "        raise ValueError(f'got {how}')\n"
        "    os.write(1, f'rank {rank}\\n'.encode())\n"
        "if __name__ == '__main__':\n"
        "    run_command(main, Config)\n"
    )
    return site


LAUNCHES = """
import sys
from draftsmith.command import guarded
from draftsmith.launch import launch
for line in sys.argv[1:]:
    code = guarded(lambda argv: launch("draftsmith.train.entry", argv), line.split())
    print(f"{line}: {code}", flush=True)
"""


def test_a_launch_has_one_voice_and_its_exit_code(installed: Path, tmp_path: Path) -> None:
    """Without the launcher, by one process of it, by two that fail alike, by two killed ones."""
    lines = {
        "processes=1 how=well": ["rank none", 0],
        "--processes 1 --how badly": ["error: got badly", 2],
        "config=cpu --how badly": ["error: got badly", 2],
        "config=cpu_ddp2 how=well": ["rank 0", "rank 1", 0],
        "processes=2 hw=1": ["error: unknown key 'hw': did you mean how?", 2],
        "processes=2 how=killed": ["a process was ended by SIGKILL", 1],
    }
    run = subprocess.run(
        [sys.executable, "-c", LAUNCHES, *lines],
        env=os.environ | {"PYTHONPATH": str(installed), "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    expected = [[*said[:-1], f"{line}: {said[-1]}"] for line, said in lines.items()]
    said = run.stdout.replace("rank 1\nrank 0", "rank 0\nrank 1").splitlines()
    assert said == [line for lines in expected for line in lines]


def test_the_package_hands_out_what_its_readers_use() -> None:
    assert draftsmith.Decoder is Decoder and draftsmith.load_drafter is load_drafter
    with pytest.raises(AttributeError, match="no attribute 'Decodr'"):
        draftsmith.Decodr  # noqa: B018


def test_an_entry_runs_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "draftsmith", "train", "pretrain", "recipe=quickstart/draft"]
    run = subprocess.run(
        [*command, "processes=1", "target=nowhere", "--out", "run"],
        env=os.environ | {"PYTHONPATH": str(installed), "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2 and run.stderr.splitlines()[-1].startswith("error: ")
    assert "nowhere" in run.stderr and "Traceback" not in run.stderr
