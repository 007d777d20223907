"""What resumable folders share: they know whose they are, who writes, and what a kill left."""

import errno
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from draftsmith.models.disk import store
from draftsmith.models.disk.store import (
    Gone,
    Manifest,
    appending,
    hold,
    open_shard,
    read_lines,
    save_shard,
    what_differs,
)

KIND = Manifest("kind.json", "the test", schema=2, decides="made", free=("path",))
MADE = {"seed": 5, "target": {"path": "a", "body": "0f" * 32}, "law": [1.0, 0]}


def content(**changes: object) -> dict[str, object]:
    return {"schema": 2, "made": MADE | changes, "rows": 0}


def test_a_folder_goes_on_or_says_what_differs(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert KIND.claim(folder, {"made": MADE, "rows": 0}) == content()
    KIND.write(folder, content() | {"rows": 3})
    moved = {"path": "b", "body": "0f" * 32}
    assert KIND.claim(folder, content(target=moved))["rows"] == 3
    other = content(target={"body": "1f" * 32}, law=(1.0, 2), loss=None)
    with pytest.raises(ValueError, match=r"law: \[1.0, 0\] there, \[1.0, 2\] now; target.body: "):
        KIND.claim(folder, other)
    found = what_differs(MADE, MADE | {"target": {"path": "a"}, "seed": 6})
    assert found == ["seed: 5 there, 6 now", "target.body: 0f0f0f0f0f0f there, absent now"]


def test_a_spoiled_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got no kind.json, expected a folder that the test"):
        KIND.read(tmp_path)
    for text, message in {
        '{"schema": 1, "made": {}}': "got schema 1 of schema, made; expected 2 with 'made'",
        '{"schema": 2}': "got schema 2 of schema; expected 2 with 'made'",
        '{"schema"': "kind.json, which cannot be read",
    }.items():
        (tmp_path / KIND.name).write_text(text)
        for use in (lambda: KIND.read(tmp_path), lambda: KIND.claim(tmp_path, content())):
            with pytest.raises(ValueError, match=message):
                use()
        assert (tmp_path / KIND.name).read_text() == text


def test_one_process_writes_until_it_is_killed(tmp_path: Path) -> None:
    heard, told = os.pipe()
    first = os.fork()
    if not first:
        try:
            lock = hold(tmp_path, "")
            os.write(told, b"held" if lock.is_locked else b"none")
            signal.pause()
        finally:
            os._exit(1)
    assert os.read(heard, 4) == b"held"
    for again in (False, True):  # the first refusal must not wipe out who it is
        with pytest.raises(ValueError, match=rf"written by process {first}; wait for it"):
            hold(tmp_path, "wait for it", again=again)
    hold(tmp_path, "", name=".other").release()
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    os.close(heard)
    os.close(told)
    lock = hold(tmp_path, "")
    with pytest.raises(ValueError, match=f"written by process {os.getpid()}"):
        hold(tmp_path, "")
    lock.release()
    kept = [hold(tmp_path, "", again=True) for _ in range(2)]
    kept[0].release(force=True)
    hold(tmp_path, "").release()


def test_a_shard_is_whole_and_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x-00000.safetensors"
    rows = torch.arange(12.0).view(3, 4)
    save_shard(path, {"rows": rows.T}, of="mine 1", about="it")
    with open_shard(path, "copy it", of="mine") as shard:
        assert torch.equal(shard.get_tensor("rows"), rows.T)
        assert shard.metadata()["about"] == "it"
    whole = path.read_bytes()
    with pytest.raises(ValueError, match=r"x-00000.*foreign .*other content.*; copy it"):
        open_shard(path, "copy it", of="yours").__enter__()
    with (
        pytest.raises(ValueError, match=r"x-00000.*KeyError\('what'\)"),
        open_shard(path, "") as it,
    ):
        it.metadata()["what"]
    for spoiled in (whole[:-3], whole + b"x", b"", b"\xff" * 99):
        path.write_bytes(spoiled)
        with pytest.raises(ValueError, match=r"x-00000.*cut or foreign .*; copy it"):
            open_shard(path, "copy it").__enter__()
    path.write_bytes(whole)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_shard(path, {"rows": rows + 1}, of="mine 2")
    assert path.read_bytes() == whole and os.listdir(tmp_path) == [path.name]
    path.unlink()
    for kind in (ValueError, FileNotFoundError):
        with pytest.raises(kind, match=r"x-00000\.safetensors: got a shard that is missing"):
            open_shard(path, "").__enter__()
    assert issubclass(Gone, FileNotFoundError)


@pytest.mark.parametrize("left", [b"", b'{"n": 0}\n', b'{"n": 0}\n{"n": 1}\n{"n": 2', b'{"n"'])
def test_a_torn_line_is_dropped(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "answers-0.jsonl"
    path.write_bytes(left)
    whole = left.count(b"\n")
    assert [record["n"] for record in read_lines(path)] == list(range(whole))
    with appending(path, "one at a time") as append:
        append({"n": whole})
        assert len(list(read_lines(path))) == whole + 1, "what is written is there at once"
        with pytest.raises(ValueError, match=f"by process {os.getpid()}; one at a time"):
            appending(path, "one at a time").__enter__()
        append({"n": whole + 1})
    assert [record["n"] for record in read_lines(path)] == list(range(whole + 2))
    path.write_bytes(path.read_bytes() + b"]\n" + json.dumps({"n": 0}).encode() + b"\n")
    with pytest.raises(ValueError, match=rf"answers-0.jsonl:{whole + 3}: not JSON"):
        list(read_lines(path))
