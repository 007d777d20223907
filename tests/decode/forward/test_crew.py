"""Passes on several threads: to the last bit those of one."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from draftsmith.decode.forward import native
from draftsmith.decode.forward.compiled import library
from draftsmith.decode.forward.product import Product
from draftsmith.decode.forward.runner import Runner
from tests.tools.tiny_llama import build_llama

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda count: monkeypatch.setattr(torch, "get_num_threads", lambda: count)


def given() -> tuple[Product, Tensor]:
    torch.manual_seed(0)
    product = Product([torch.randn(302, 1536).bfloat16()], [torch.randn(302).bfloat16()])
    return product, torch.randn(100, 1536).bfloat16()


def by_hand(product: Product, x: Tensor, count: int) -> Tensor:
    own, made = product.native, torch.full((len(x), 302), float("nan")).bfloat16()
    assert own is not None
    own.call(own.maps, len(own.maps), x.data_ptr(), made.data_ptr(), len(x), *own.sizes, count)
    return made


@pytest.mark.parametrize("tokens", [1, 6, 40, 100])
def test_products_on_any_number_of_threads(tokens: int) -> None:
    product, x = given()
    wanted = by_hand(product, x[:tokens], 1)
    for count in (2, 3, 7, 40):
        assert torch.equal(by_hand(product, x[:tokens], count), wanted)


def test_callers_at_once() -> None:
    product, x = given()
    wanted = by_hand(product, x[:6], 1)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: by_hand(product, x[:6], 2), range(400)))
    assert all(torch.equal(one, wanted) for one in made)


def test_a_forked_process_has_its_own() -> None:
    product, x = given()
    wanted = by_hand(product, x[:6], 3)

    def in_a_fork() -> None:
        os._exit(0 if torch.equal(by_hand(product, x[:6], 3), wanted) else 1)

    child = multiprocessing.get_context("fork").Process(target=in_a_fork, daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_a_large_target_on_all_threads(
    monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]
) -> None:
    model = build_llama(320, layers=2, hidden=512, seed=0).bfloat16().requires_grad_(False)
    monkeypatch.setattr(native, "SMALL", 0)
    runner, found = Runner(model, 320), []
    assert runner.native is not None
    for count in (1, 2, 3):
        threads(count)
        assert runner.native.body.threads == count
        found.append(runner._trial())
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    monkeypatch.undo()
    assert Runner(model, 320).native.body.threads == 1  # type: ignore[union-attr]
