"""The cache of the target's states: what it holds, and everything that it must refuse.

Shapes: B rows, T positions, N tokens, S states a token, G hidden size.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from tapped_texts import LENGTH, SHARD_BYTES, batches, contents, examples, some_batches
from torch import Tensor

from draftsmith.models.disk import store
from draftsmith.models.taps import NORM
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.train.teachers import store as token_shards
from draftsmith.train.teachers.states import (
    STORED,
    Cache,
    OnlineTaps,
    TapCache,
    open_states,
    quantised,
)
from draftsmith.train.text.batches import Batches, Examples

TAPS = (3, NORM, 1)


@pytest.fixture
def make(tmp_path: Path, tiny_target, tiny_tokenizer, monkeypatch):
    def cache(
        name: str = "cache",
        text: Batches | None = None,
        taps=TAPS,
        stored: str = "float32",
        shard_bytes: int = SHARD_BYTES,
    ) -> TapCache:
        monkeypatch.setattr(token_shards, "SHARD_BYTES", shard_bytes)
        given = (tmp_path / name, tiny_target, tiny_tokenizer, text or batches())
        return TapCache(*given, taps, stored)

    return cache


@pytest.fixture
def written(make) -> TapCache:
    cache = make()
    cache.claim()
    cache.write()
    return cache


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("taps", [TAPS, (NORM,), (2,), (0, 2, 3)])
def test_cached_states_are_the_online_ones(make, tiny_target, packing: bool, taps) -> None:
    """Up to the rounding of matrix products of other shapes."""
    cache = make(taps=taps)
    cache.claim()
    cache.write()
    assert len(cache) > 1
    online = OnlineTaps(tiny_target, taps)
    for batch in some_batches(packing):
        real_BT = batch.places >= 0
        for want, got in zip(online(batch), cache(batch), strict=True):
            assert got.shape == want.shape and got.dtype == want.dtype
            error_BTF = (got - want)[real_BT].abs()
            assert error_BTF.max() <= 1e-6 * want.abs().max()
            assert not got[~real_BT].any()


@pytest.mark.parametrize("packing", [True, False])
def test_rows_are_exactly_those_in_the_files(make, written: TapCache, packing: bool) -> None:
    """Every token's row, found the slow way: walk the pieces in their order through the shards."""
    paths = sorted(written.folder.glob("*.safetensors"))
    rows = iter(torch.cat([load_file(path)["states"] for path in paths]))
    row_of = {
        place: next(rows) for span in written.batches.cut.spans.tolist() for place in range(*span)
    }
    assert next(rows, None) is None
    read = make(taps=(NORM, 3, 1))  # the same states in another order
    for batch in some_batches(packing):
        norm_BTG, taps_BTF = read(batch)
        for place, norm, taps in zip(
            batch.places.flatten().tolist(),
            norm_BTG.flatten(0, 1),
            taps_BTF.flatten(0, 1),
            strict=True,
        ):
            if place >= 0:
                assert torch.equal(norm, row_of[place][0])
                assert torch.equal(taps, row_of[place].flatten())


def test_each_state_is_stored_once(written: TapCache) -> None:
    assert written.states == (NORM, 3, 1)
    shard = load_file(written.path(0))
    assert shard.keys() == {"states"} and shard["states"].shape[1:] == (3, 32)


def everything(cache: TapCache) -> Tensor:
    """All rows [N, S, G], in fp32."""
    spans = cache.batches.cut.spans.tolist()
    places = torch.cat([torch.arange(*span) for span in spans])
    return cache.rows(places, torch.device("cpu"), torch.float32)


def test_bf16_is_the_rounded_state(make, written: TapCache) -> None:
    cache = make("bf16", stored="bfloat16", shard_bytes=SHARD_BYTES // 2)
    cache.claim()
    cache.write()
    assert torch.equal(everything(cache), everything(written).bfloat16().float())


def test_int8_is_off_by_half_a_step_at_most(make, written: TapCache) -> None:
    cache = make("int8", stored="int8", shard_bytes=SHARD_BYTES * 108 // 384)
    cache.claim()
    cache.write()
    want_NSG = everything(written)
    step_NS1 = want_NSG.abs().amax(-1, keepdim=True) / 127
    error_NSG = (everything(cache) - want_NSG).abs()
    assert (error_NSG <= 0.5 * step_NS1 * (1 + 1e-5)).all()
    assert error_NSG.max() > 0


def test_zeros_survive_int8() -> None:
    numbers, scales = quantised(torch.zeros(2, 3, 4))
    assert not numbers.any() and torch.isfinite(scales).all()


def test_int8_error_on_a_real_model(target_15m: Path, gsm8k_path: Path, tmp_path: Path) -> None:
    """The figure in the docstring of states.py: rms error over rms, for each of its four states."""
    target, tokenizer = load_target(TargetSpec(str(target_15m), "float32"), "cpu")
    rows = [json.loads(line) for line in gsm8k_path.read_text().splitlines()[-16:]]
    ids = [tokenizer(row["question"] + row["answer"])["input_ids"] for row in rows]
    text = batches(
        examples=Examples.collect((one, [True] * len(one)) for one in ids), max_length=256
    )
    states = {}
    for stored in ("float32", "int8"):
        cache = TapCache(tmp_path / stored, target, tokenizer, text, (2, 4, 5), stored)
        cache.claim()
        cache.write()
        states[stored] = everything(cache)
    error_S = (states["int8"] - states["float32"]).square().mean((0, 2)).sqrt()
    size_S = states["float32"].square().mean((0, 2)).sqrt()
    assert (error_S / size_S < 0.0135).all(), error_S / size_S


def test_two_processes_write_the_folder_of_one(make, written: TapCache) -> None:
    for rank in (1, 0):
        cache = make("two")
        cache.claim()
        cache.write(rank, 2)
    assert contents(cache) == contents(written)


def test_goes_on_after_a_kill_in_a_shard(make, written: TapCache, monkeypatch) -> None:
    whole = store.write_atomically
    cache = make("killed")

    def killed(path: Path, content: bytes) -> None:
        if path == cache.path(2):
            path.with_name(f".{path.name}.half").write_bytes(content[: len(content) // 2])
            raise KeyboardInterrupt
        whole(path, content)

    monkeypatch.setattr(store, "write_atomically", killed)
    cache.claim()
    with pytest.raises(KeyboardInterrupt):
        cache.write()
    monkeypatch.undo()
    assert sorted(path.name for path in cache.folder.glob("states*")) == [
        "states-00000.safetensors",
        "states-00001.safetensors",
    ]
    kept = {path: path.stat().st_mtime_ns for path in cache.folder.glob("states*")}
    again = make("killed")
    again.claim()
    again.write()
    assert contents(again) == contents(written)
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())


def test_another_run_reads_the_same_folder(make, written: TapCache) -> None:
    """Whatever its rows, it takes every shard as it is."""
    kept = {path: path.stat().st_mtime_ns for path in written.folder.iterdir()}
    other = make(text=batches(packing=True))
    other.claim()
    other.write()
    assert torch.equal(everything(other), everything(written))
    assert {path: path.stat().st_mtime_ns for path in written.folder.iterdir()} == kept


def test_size_is_told_before_it_starts(make, capsys) -> None:
    for stored in STORED:
        cache = make(stored, stored=stored, shard_bytes=10**6)
        cache.claim()
        told = int(cache.offsets[-1]) * cache.token_bytes
        assert f"{told / 1e9:.2f} GB of it to write" in capsys.readouterr().out
        cache.write()
        on_disk = sum(path.stat().st_size for path in cache.folder.glob("states*"))
        assert on_disk == pytest.approx(told, rel=0.02)
        cache.claim()
        assert "0.00 GB of it to write" in capsys.readouterr().out


def test_a_disk_without_room_is_refused(make, monkeypatch) -> None:
    cache = make()
    room = shutil_usage(free=int(cache.offsets[-1]) * cache.token_bytes - 1)
    monkeypatch.setattr(token_shards.shutil, "disk_usage", lambda path: room)
    with pytest.raises(ValueError, match=r"got 0\.0 GB free.*cache\.int8=true"):
        cache.claim()


@dataclass
class shutil_usage:
    free: int


def test_a_cache_of_other_weights_is_refused(written: TapCache, make, tiny_target) -> None:
    weight = tiny_target.model.layers[1].mlp.up_proj.weight
    weight += 1.0
    try:
        with pytest.raises(ValueError, match=r"begun with other.*body: \w{12} there, \w{12} now"):
            make().claim()
    finally:
        weight -= 1.0


CHANGED = {
    "examples": {"text": batches(examples=examples(seed=1))},
    "max_length": {"text": batches(max_length=LENGTH - 1)},
    "states": {"taps": (1, 3)},
    "stored": {"stored": "int8"},
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_cache_of_something_else_is_refused(written: TapCache, make, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: .* there, .* now.*or delete"):
        make(**CHANGED[name]).claim()


def spoil(cache: TapCache, how: str) -> None:
    path = cache.path(1)
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[:-100])
    elif how == "flipped":
        content[-100] ^= 4
        path.write_bytes(content)
    else:
        save_file(load_file(path), path, {"of": "another"})


@pytest.mark.parametrize("how", ["cut", "flipped", "another"])
def test_a_damaged_shard_is_refused_by_name(written: TapCache, make, how: str) -> None:
    spoil(written, how)
    again = make()
    again.claim()
    with pytest.raises(ValueError, match=r"states-00001\.safetensors: got .*delete this file"):
        again.write()
    whole = written.path(0).stat().st_mtime_ns
    again.path(1).unlink()
    repaired = make()
    repaired.write()
    assert repaired.path(0).stat().st_mtime_ns == whole
    assert torch.equal(everything(repaired), everything(make()))


@pytest.mark.parametrize("how", ["cut", "missing", "another"])
def test_reading_a_damaged_shard_is_refused_by_name(written: TapCache, make, how: str) -> None:
    spoil(written, how)
    with pytest.raises(ValueError, match=r"states-00001\.safetensors: got .*delete this file"):
        everything(make())


def copied() -> int:
    """Bytes in this process's memory, what is merely mapped from files apart."""
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


@pytest.mark.skipif(not psutil.LINUX, reason="shared memory is counted on Linux alone")
def test_reading_loads_the_rows_alone(make) -> None:
    """A shard of 200 MB is mapped, not read: forty rows of it take a few megabytes."""
    ids = list(range(4, 300)) * 9
    tokens = [(ids, [True] * len(ids))] * 200
    text = batches(examples=Examples.collect(tokens), max_length=len(ids))
    cache = make("large", text, shard_bytes=10**9)
    count = int(cache.offsets[-1])
    cache.folder.mkdir()
    states = torch.arange(count, dtype=torch.float32)[:, None, None].expand(-1, 3, 32)
    save_file({"states": states.contiguous()}, cache.path(0), {"of": cache.hash})
    assert cache.path(0).stat().st_size > 2e8
    del states
    places = torch.arange(40) * (count // 40)
    before = copied()
    found = cache.rows(places, torch.device("cpu"), torch.float32)
    assert copied() - before < 2e7
    assert torch.equal(found[:, 2, 31], places.float())


def test_states_of_another_autocast_are_refused(written: TapCache, make) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        low = make()
        with pytest.raises(ValueError, match="autocast: None there, bfloat16 now"):
            low.claim()
        make("low").claim()
    with pytest.raises(ValueError, match="autocast: bfloat16 there, None now"):
        make("low").claim()


def test_open_states(tmp_path: Path, tiny_target, tiny_tokenizer) -> None:
    def opened(name: str = "", int8: bool = False):
        given = (tiny_target, tiny_tokenizer, TAPS, batches())
        settings = Cache(path=str(tmp_path / name) if name else "", int8=int8)
        return open_states(settings, Accelerator(cpu=True), *given)

    assert isinstance(opened(), OnlineTaps)
    cached, small = opened("bf16"), opened("int8", int8=True)
    assert isinstance(cached, TapCache) and isinstance(small, TapCache)
    assert (cached.stored, small.stored) == ("bfloat16", "int8")
    with pytest.raises(ValueError, match=r"cache\.int8=true without a cache"):
        opened(int8=True)
    with pytest.raises(
        ValueError, match=r"cache\.top_k: got 8, expected 0: a head reads the target's"
    ):
        given = (tiny_target, tiny_tokenizer, TAPS, batches())
        open_states(Cache(path="x", top_k=8), Accelerator(cpu=True), *given)
    with pytest.raises(ValueError, match="stored: bfloat16 there, int8 now"):
        opened("bf16", int8=True)
    with pytest.raises(ValueError, match="taps: got"):
        OnlineTaps(tiny_target, (9,))
