"""Small models and a tokenizer that tests share: built in memory in under a second, no network."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import CHAT_TEMPLATE, SHARED, build_llama
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.decode.evaluate import metrics
from draftsmith.decode.policies import timing
from draftsmith.decode.predict import timed_rounds
from draftsmith.models.tokenizer import stand_in_tokenizer
from draftsmith.train.run import recipe


def pytest_collection() -> None:
    """Nothing that is made while tests are read in is garbage, nor is it looked through afterwards:
    all these modules, again and again, took a twentieth of the suite.
    """
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def few_turns() -> Iterator[None]:
    """What a forward costs is measured in two turns, not in 100, and any figure is believed: how
    fine and how sane they are is asked in test_speed.py alone. So are rounds, in turns of two.
    Intervals are of 200 draws, not of 2000.
    """
    least, draw = timing.least_times, metrics.bootstraps

    def soon(calls: Any, device: Any, turns: int = 2) -> Any:
        return least(calls, device, min(turns, 2))

    def few(statistics: Any, prompts: int, draws: int = 200) -> Any:
        return draw(statistics, prompts, min(draws, 200))

    few.whole = draw  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(timing, "least_times", soon)
        patched.setattr(timing, "SANE", 0.0)
        patched.setattr(timed_rounds, "TURNS", 1)
        patched.setattr(timed_rounds, "TURN", 2)
        patched.setattr(metrics, "bootstraps", few)
        yield


@pytest.fixture(scope="session", autouse=True)
def composed_once() -> Iterator[None]:
    """Each of the repository's recipes, which no test changes: hydra takes a tenth of a second."""
    compose, ours = recipe._parts, recipe.RECIPES
    known = cache(compose)

    def parts(name: str) -> list[dict[str, Any]]:
        return (known if ours == recipe.RECIPES and name in recipe.names() else compose)(name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recipe, "_parts", parts)
        yield


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = stand_in_tokenizer(320)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def tiny_target(tiny_tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Frozen, as targets are: it decodes through the lean body, the draft through its own."""
    return build_llama(len(tiny_tokenizer), layers=3, hidden=32, seed=0).requires_grad_(False)


@pytest.fixture(scope="session")
def tiny_draft(tiny_tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return build_llama(len(tiny_tokenizer), layers=1, hidden=32, seed=1)


@pytest.fixture(scope="session")
def gsm8k_path() -> Path:
    path = SHARED / "data" / "gsm8k" / "train.jsonl"
    if not path.exists():
        pytest.skip("GSM8K is not beside this checkout (../shared/data/gsm8k)")
    return path


@pytest.fixture(scope="session")
def target_15m() -> Path:
    path = SHARED / "models" / "target-15m"
    if not path.exists():
        pytest.skip("the 15M target is not beside this checkout (../shared/models/target-15m)")
    return path


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with one: prompts and passes of many tokens of small models are in C++ too."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
