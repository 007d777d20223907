"""Matrices in 12 bits a weight: products are those of the matrix, to the last bit."""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from draftsmith.decode.forward import compressed as room
from draftsmith.decode.forward.compiled import library
from draftsmith.decode.forward.product import NativeProduct
from draftsmith.decode.forward.runner import Runner
from tests.tools.tiny_llama import build_llama

SHAPES = [(4, 64), (10, 192), (130, 384), (96, 1536), (37, 80)]


def strange(weight: Tensor) -> Tensor:
    """With zeros, denormals, infinities, and numbers far from the others, some side by side."""
    flat = weight.flatten()
    some = torch.tensor([0.0, -0.0, 1e-40, -3e-39, 1e-30, -1e-20, 3e38, -1e30, float("inf"), 7.0])
    flat[3:13] = some.to(weight.dtype)
    flat[63::577] = 1e-25
    flat[-1] = -1e-12
    return weight


@pytest.fixture(autouse=True)
def here() -> None:
    if library() is None:
        pytest.skip("no compiler")
    if not room.compressed([torch.randn(4, 64).bfloat16()])[0].read:
        pytest.skip("this processor has no AVX2")


def read(product: NativeProduct, forms: bool) -> None:
    for form in product.compressed:
        form.tell(forms)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("out,into", SHAPES)
def test_products_are_the_matrixs_to_the_last_bit(
    out: int, into: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of tokens, each as it is alone; and as near to the exact ones as bf16 is."""
    monkeypatch.setattr(room, "PATCHES", 4)
    weight, x = torch.randn(out, into).bfloat16(), torch.randn(70, into).bfloat16()
    bias = [torch.randn(out).bfloat16()] if biased else []
    patches: list[int] = []
    for own in (weight, strange(weight.clone())):
        product = NativeProduct([own], bias)
        (form,) = product.compressed
        assert form.held is not None
        found = form.held[1].tolist()
        blocks = [patch >> 24 for patch in found[: found.index(2**63 - 1)]]
        assert blocks == sorted(blocks)
        patches.append(len(blocks))
        short = product(x)
        read(product, False)
        lying = product(x)
        read(product, True)
        assert short is not None and lying is not None
        assert torch.equal(short.view(torch.int16), lying.view(torch.int16))
        for tokens in (*range(1, 14), 24, 25, 33, 47):
            made = product(x[:tokens])
            assert made is not None
            assert torch.equal(made.view(torch.int16), short[:tokens].view(torch.int16)), tokens
        if own is weight:
            exact = x.double() @ weight.double().T + (bias[0].double() if biased else 0)
            size = x.double().abs() @ weight.double().abs().T
            assert ((short - exact).abs() <= 2**-8 * exact.abs() + 2**-20 * size).all()
        # It is what is read: with other bytes other products come of it.
        form.held[0][:, room.TABLE :].zero_()
        assert not torch.equal(product(x[:2]), short[:2])
    assert patches[1] > patches[0]


def test_a_matrix_of_too_many_exponents_stays_as_it_is() -> None:
    wide = torch.randint(-(2**15), 2**15, (64, 64), dtype=torch.int16).view(torch.bfloat16)
    (form,) = room.compressed([wide])
    assert not form.read and form.held is None
    odd, across = torch.randn(16, 72).bfloat16(), torch.randn(64, 64).bfloat16().T
    assert room.compressed([odd, across, torch.randn(16, 64), None]) == []


def test_where_memory_is_short_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.randn(64, 64).bfloat16() for _ in range(2)]
    assert len(room.compressed(weights)) == 2
    gc.collect()
    size, spare = sum(weight.nbytes for weight in weights), psutil.virtual_memory().total
    for free in (room.ROOM * size - 1, size + spare // room.SPARE - 1):
        monkeypatch.setattr(room, "memory_free", lambda free=free: free)
        assert room.compressed(weights) == []
    monkeypatch.setattr(room, "memory_free", lambda: room.ROOM * size + spare)
    assert len(room.compressed(weights)) == 2


def test_one_form_for_all_while_anyone_holds_it() -> None:
    weight, x = torch.randn(8, 64).bfloat16(), torch.randn(2, 64).bfloat16()
    (first,), (again,) = room.compressed([weight]), room.compressed([weight])
    (part,) = room.compressed([weight[:4]])
    assert first is again is part
    product = NativeProduct([weight], [])
    wanted, product.compressed = product(x), []
    first.held[0].zero_()  # so that what it makes can be told
    assert wanted is not None and not torch.equal(product(x), wanted)
    del first, part
    gc.collect()
    assert not torch.equal(product(x), wanted)
    del again
    gc.collect()
    assert torch.equal(product(x), wanted)


@pytest.mark.parametrize("wide", [False, True])
def test_a_changed_matrix_is_compressed_anew(wide: bool) -> None:
    """After some products, until which it is read as it lies, as where it can't be any more."""
    weight, x = torch.randn(8, 64).bfloat16(), torch.randn(2, 64).bfloat16()
    product = NativeProduct([weight], [])
    (form,) = product.compressed
    if wide:
        weight.copy_(2.0 ** torch.arange(512).remainder(100).view(8, 64))
    weight.mul_(3)
    for _ in range(room.AFTER):
        made = product(x)
        assert made is not None and not form.read
    made = product(x)
    assert made is not None and form.read is not wide
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    assert ((made - exact).abs() <= 2**-8 * exact.abs() + 2**-20 * size).all()
    assert room.compressed([weight]) == [form] and (form.held is None) is wide
    if form.held is not None:
        form.held[0].zero_()
        assert not torch.equal(product(x), made)
    weight.copy_(torch.ones(8, 64))  # which can be again
    assert room.compressed([weight]) == [form] and form.read
    assert torch.allclose(product(x).float(), x.float().sum(-1, keepdim=True), atol=0.2)


@pytest.mark.parametrize("wholly", [False, True])
def test_changes_that_torch_doesnt_count(wholly: bool) -> None:
    weight, x = torch.randn(8, 64).bfloat16(), torch.randn(2, 64).bfloat16()
    product = NativeProduct([weight], [])
    before = product(x)
    weight.data.mul_(-1)
    assert torch.equal(product(x), before)
    room.compressed([weight], wholly=wholly)
    assert torch.equal(product(x), -before) is wholly


def test_storage_that_a_parameter_left_is_nobody_elses() -> None:
    weight = torch.nn.Parameter(torch.randn(512, 1024).bfloat16(), requires_grad=False)
    (form,) = room.compressed([weight])
    place = weight.data_ptr()
    weight.data = weight.data.float()
    others = [torch.randn(512, 1024).bfloat16() for _ in range(20)]
    assert form.read and place not in {other.data_ptr() for other in others}


def test_a_form_is_not_freed_while_it_is_read() -> None:
    weight, x = torch.randn(64, 1024).bfloat16(), torch.randn(4, 1024).bfloat16()
    product, done = NativeProduct([weight], []), False
    wanted = product(x)

    def reads() -> bool:
        same = True
        while not done:
            same = same and torch.equal(product(x), wanted)
        return same

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(reads) for _ in range(2)]
        product.compressed.clear()
        for _ in range(300):
            assert room.compressed([weight])
        done = True
        assert all(one.result() for one in reading)


def test_callers_at_once_that_find_a_matrix_changed() -> None:
    """One of them makes its form anew: no buffers go that others read."""
    weight, x = torch.randn(256, 1024).bfloat16(), torch.randn(4, 1024).bfloat16()
    product = NativeProduct([weight], [])
    (form,) = product.compressed
    lost, make = [], form.make

    def made() -> None:
        before = form.read
        make()
        lost.append(before)  # whether what was read has been replaced

    form.make = made  # type: ignore[method-assign]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(20):
            weight.mul_(-1)
            found = [*pool.map(lambda _: product(x), range(60))]
            assert all(torch.equal(one, found[0]) for one in found)
    assert len(lost) == 20 and not any(lost)


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


def test_forms_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a slab holds, and made anew where they are; of a large one all goes with it."""
    monkeypatch.setattr(room, "_left", torch.empty(0, dtype=torch.uint8))
    weights = [torch.randn(2048, 1024 if i < 5 else 6144).bfloat16() for i in range(6)]
    forms = room.compressed(weights)
    rooms = [form.held[0] for form in forms if form.held is not None]
    at, size = zip(*((one.data_ptr(), one.nbytes) for one in rooms), strict=True)
    assert size[5] > room.SLAB // 2
    assert all(at[i + 1] == at[i] + size[i] and at[i] % 64 == 0 for i in range(4))
    assert sum(size[:5]) <= room.SLAB
    *slab, large = (one.untyped_storage().data_ptr() for one in (room._left, *rooms))
    assert len(set(slab)) == 1 and large != slab[0]
    with torch.no_grad():
        weights[1].neg_()
    forms[1].follow(after=0)
    assert forms[1].read and forms[1].at.bytes == at[1]
    x_TI = torch.randn(3, 1024).bfloat16()
    for weight in weights[:5]:
        product = NativeProduct([weight], [])
        short = product(x_TI)
        read(product, False)
        lying = product(x_TI)
        assert short is not None and lying is not None and torch.equal(short, lying)


def test_a_target_decodes_by_it() -> None:
    runner = Runner(target(), 120)
    assert runner.native is not None
    forms, part = runner.native.compressed, runner.part(1).native
    assert len(forms) == 7 * runner.native.layers + 1
    assert part is not None and part.compressed == forms
    short = trial(runner)
    for form in forms:
        form.held[0].zero_()
    assert not all(torch.equal(a, b) for a, b in zip(short, trial(runner), strict=True))
    for form in forms:
        form.tell(False)
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
    for form in new.native.compressed:
        form.tell(False)
    fresh = trial(new)
    for form in new.native.compressed:
        form.tell(True)
    for one in everyone:
        assert all(torch.equal(a, b) for a, b in zip(trial(one), fresh, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, fresh, strict=True))
