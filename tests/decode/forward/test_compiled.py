"""Where what C++ reads lies."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from draftsmith.decode.forward import compiled


def test_only_what_is_large_lies_on_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pages of it, none beyond; what no system call is for stays as it is."""
    asked: list[tuple[int, int, int]] = []

    def madvise(begin: ctypes.c_void_p, size: ctypes.c_size_t, advice: int) -> int:
        asked.append((begin.value or 0, size.value, advice))
        return 0

    with monkeypatch.context() as here:
        here.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(madvise=madvise))
        large, small = torch.empty(5 * compiled.LARGE, dtype=torch.uint8), torch.empty(8)
        for one in (large, small, torch.empty(1 << 30, device="meta")):
            assert compiled.in_large_pages(one) is one
        ((begin, size, advice),) = asked
        assert begin % compiled.LARGE == size % compiled.LARGE == 0 and advice == 14
        assert large.data_ptr() <= begin and begin + size <= large.data_ptr() + large.nbytes
        assert size >= 4 * compiled.LARGE
        here.setattr(ctypes, "CDLL", lambda _: object())
        assert compiled.in_large_pages(large) is large and len(asked) == 1
    assert bool((compiled.in_large_pages(torch.empty(4 << 20)).zero_() == 0).all())
