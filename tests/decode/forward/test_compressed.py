"""Matrices in 12 bits a weight: products of few tokens are those of the matrix, to the last bit."""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from draftsmith.decode.forward import compressed as room
from draftsmith.decode.forward.compiled import library
from draftsmith.decode.forward.product import FewTokens
from draftsmith.decode.forward.runner import Runner
from tests.tools.tiny_llama import build_llama

SHAPES = [(4, 64), (10, 192), (130, 384), (96, 1536)]


def strange(weight: Tensor) -> Tensor:
    """With zeros, denormals, infinities, and numbers far from the others, some side by side."""
    flat = weight.flatten()
    some = torch.tensor([0.0, -0.0, 1e-40, -3e-39, 1e-30, -1e-20, 3e38, -1e30, float("inf"), 7.0])
    flat[3:13] = some.to(weight.dtype)
    flat[63::577] = 1e-25
    flat[-1] = -1e-12
    return weight


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LEAST", 0)
    if library() is None:
        pytest.skip("no compiler")
    if not room.compressed([torch.randn(4, 64).bfloat16()]):
        pytest.skip("this processor has no AVX2, or multiplies by tiles")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("out,into", SHAPES)
def test_products_are_the_matrixs_to_the_last_bit(
    out: int, into: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PATCHES", 4)
    weight, x = torch.randn(out, into).bfloat16(), torch.randn(33, into).bfloat16()
    bias = [torch.randn(out).bfloat16()] if biased else []
    patches: list[int] = []
    for own in (weight, strange(weight.clone())):
        few = FewTokens([own], bias)
        few.most = 33
        each = [*range(1, 8), 33]
        plain = [few(x[:tokens]) for tokens in each]
        (held,) = room.compressed([own])
        blocks = [patch >> 24 for patch in held.held[1].tolist()]
        assert blocks == sorted(blocks)
        patches.append(len(blocks))
        for tokens, wanted in zip(each, plain, strict=True):
            made = few(x[:tokens])
            assert made is not None and wanted is not None
            assert torch.equal(made.view(torch.int16), wanted.view(torch.int16))
        # It is what is read: with other bytes other products come of it.
        held.held[0][:, room.TABLE :].zero_()
        made, fours = few(x[:2]), out - out % 4
        assert made is not None and not torch.equal(made[:, :fours], plain[1][:, :fours])
    assert patches[1] > patches[0]


def test_a_matrix_of_too_many_exponents_stays_as_it_is() -> None:
    wide = torch.randint(-(2**15), 2**15, (64, 64), dtype=torch.int16).view(torch.bfloat16)
    odd, few = torch.randn(16, 96).bfloat16(), torch.randn(3, 64).bfloat16()
    assert room.compressed([wide, odd, few]) == []


def test_where_memory_is_short_or_the_matrices_are_small_none_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [torch.randn(64, 64).bfloat16() for _ in range(2)]
    assert len(room.compressed(weights)) == 2
    gc.collect()
    size = sum(weight.nbytes for weight in weights)
    with monkeypatch.context() as here:
        here.setattr(room, "memory_free", lambda: room.ROOM * size - 1)
        assert room.compressed(weights) == []
    monkeypatch.setattr(room, "LEAST", size + 1)
    assert room.compressed(weights) == []


def test_one_form_for_all_while_anyone_holds_it() -> None:
    weight, x = torch.randn(8, 64).bfloat16(), torch.randn(2, 64).bfloat16()
    few = FewTokens([weight], [])
    wanted = few(x)
    (first,), (again,) = room.compressed([weight]), room.compressed([weight])
    assert first is again
    first.held[0].zero_()  # so that what it makes can be told
    assert wanted is not None and not torch.equal(few(x), wanted)
    del first
    gc.collect()
    assert not torch.equal(few(x), wanted)
    del again
    gc.collect()
    assert torch.equal(few(x), wanted)


def test_a_changed_matrix_is_read_as_it_lies_and_compressed_anew() -> None:
    weight, x = torch.randn(8, 64).bfloat16(), torch.randn(2, 64).bfloat16()
    few, (old,) = FewTokens([weight], []), room.compressed([weight])
    weight.mul_(3)
    wanted = few(x)
    assert wanted is not None and not old.read
    assert torch.allclose(wanted.float(), x.float() @ weight.float().T, atol=0.5)
    (new,) = room.compressed([weight])
    assert new is not old
    del old  # which no longer speaks for the matrix
    gc.collect()
    assert torch.equal(few(x), wanted)
    new.held[0].zero_()
    assert not torch.equal(few(x), wanted)


def test_storage_that_a_parameter_left_is_nobody_elses() -> None:
    weight = torch.nn.Parameter(torch.randn(512, 1024).bfloat16(), requires_grad=False)
    (form,) = room.compressed([weight])
    place = weight.data_ptr()
    weight.data = weight.data.float()
    others = [torch.randn(512, 1024).bfloat16() for _ in range(20)]
    assert form.read and place not in {other.data_ptr() for other in others}


def test_a_form_is_not_freed_while_it_is_read() -> None:
    weight, x = torch.randn(64, 1024).bfloat16(), torch.randn(4, 1024).bfloat16()
    few, done = FewTokens([weight], []), False
    wanted = few(x)

    def read() -> bool:
        same = True
        while not done:
            same = same and torch.equal(few(x), wanted)
        return same

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(read) for _ in range(2)]
        for _ in range(300):
            assert room.compressed([weight])
        done = True
        assert all(one.result() for one in reading)


def test_what_a_container_may_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(room, "CGROUP", tmp_path)
    whole = room.memory_free()
    assert whole > 1 << 20
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert room.memory_free() > 1 << 20
    (tmp_path / "memory.max").write_text("4096\n")
    assert room.memory_free() == 3096


def trial(runner: Runner) -> list[Tensor]:
    return [*runner._trial(), *runner.part(1)._trial()]


def target() -> LlamaForCausalLM:
    return build_llama(120, layers=2, hidden=128, seed=0).bfloat16().requires_grad_(False)


def test_a_target_decodes_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, part = Runner(target(), 120), None
    assert runner.native is not None
    forms, part = runner.native.compressed, runner.part(1).native
    assert len(forms) == 7 * runner.native.layers + 1
    assert part is not None and part.compressed == forms
    short = trial(runner)
    for matrix in forms:
        matrix.tell(False)
    assert all(torch.equal(a, b) for a, b in zip(short, trial(runner), strict=True))


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("memory", [True, False])
@torch.no_grad()
def test_a_target_that_has_changed(
    counted: bool, memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target()
    runner, before = Runner(model, 120), trial(Runner(model, 120))
    if not memory:  # for others; what there is is shared
        monkeypatch.setattr(room, "memory_free", lambda: 0)
    second = Runner(model, 120)
    assert runner.native is not None and second.native is not None
    assert second.native.compressed == runner.native.compressed
    for weight in (model.model.layers[0].mlp.up_proj.weight, model.lm_head.weight):
        (weight if counted else weight.data).mul_(-2)
    new = Runner(model, 120)
    assert new.native is not None
    states = torch.randn(3, 128).bfloat16()
    plain = states.float() @ model.lm_head.weight.float().T
    everyone = (runner, second, new) if counted else (new,)
    for one in everyone:
        assert torch.allclose(one.logits(states), plain, atol=0.02 * float(plain.abs().max()))
    monkeypatch.setattr(room, "LEAST", 1 << 40)
    for matrix in new.native.compressed:
        matrix.tell(False)
    fresh = trial(Runner(model, 120))
    for matrix in new.native.compressed:
        matrix.tell(True)
    for one in everyone:
        assert all(torch.equal(a, b) for a, b in zip(trial(one), fresh, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, fresh, strict=True))
