"""Step controllers: forced marks give one model's own answer, and the accounts add up."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import step_controllers
import torch
from head_folders import on_disk
from step_controllers import Controlled, Writer, large_alone, small_alone
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PROMPT = [9, 40, 12, 60, 33]


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target: LlamaForCausalLM,
    tiny_draft: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("steps")
    return {
        "target": on_disk(folder / "large", tiny_target, tiny_tokenizer),
        "small": on_disk(folder / "small", tiny_draft, tiny_tokenizer),
    }


def writers(folders: dict[str, str], **changes: Any) -> tuple[Writer, Writer]:
    how = Controlled(**folders, **{"max_new_tokens": 40, "step_tokens": 8} | changes)
    return Writer(how.small, how), Writer(how.target, how)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("least", [0, 10])
def test_spec_reason_is_one_model_where_all_marks_pass_or_none(
    folders: dict[str, str], temperature: float, least: int
) -> None:
    """Step by step in the noise of one request: the answer that is written in one go."""
    small, large = writers(folders, temperature=temperature, least=least)
    alone = small_alone if least == 0 else large_alone
    wanted = alone(small, large, PROMPT, 3)
    before = small.tokens, large.tokens
    repeats = [wanted[i : i + 8] for i in range(0, len(wanted), 8)]
    got = step_controllers.spec_reason(small, large, PROMPT, 3)
    assert got == wanted[: len(got)] and len(got) >= 8
    if len(got) < len(wanted):
        assert got[-8:] in repeats[: len(got) // 8 - 1], "ended before its time, at no repetition"
    written = small.tokens - before[0], large.tokens - before[1]
    assert written == (len(got), 0 if least == 0 else len(got))


def test_a_mark_is_the_large_models_mean_probability(folders: dict[str, str]) -> None:
    _, large = writers(folders)
    for step in ([7, 8, 9], large.write(PROMPT, 0, 3)):
        with torch.no_grad():
            law = large.model(torch.tensor([PROMPT + step])).logits[0].double().softmax(-1)
        chances = [float(law[len(PROMPT) + i - 1, token]) for i, token in enumerate(step)]
        assert large.mark(PROMPT, step) == int(10 * torch.tensor(chances).log().mean().exp())
    _, asked = writers(folders, mark="digit")
    before = asked.tokens
    assert 0 <= asked.mark(PROMPT, [7, 8]) <= 9 and asked.tokens == before + 1


def test_speculative_thinking_hands_over_by_words(folders: dict[str, str]) -> None:
    never, always = {"unsure": [], "verify": []}, {"unsure": [""], "verify": [], "doubts": 999}
    small, large = writers(folders, **never, ahead=4)
    got = step_controllers.speculative_thinking(small, large, PROMPT, 0)
    assert large.tokens == 0 and got == small_alone(small, large, PROMPT, 0)[: len(got)]
    small, large = writers(folders, **always, ahead=4, short=50)
    got = step_controllers.speculative_thinking(small, large, PROMPT, 0)
    assert got == large_alone(small, large, PROMPT, 0)[: len(got)] and len(got) == 40
    small, large = writers(folders, **always, ahead=4, short=6)
    got = step_controllers.speculative_thinking(small, large, PROMPT, 0)
    kept = len(got) - large.tokens  # what was looked ahead was dropped, 4 tokens each time
    assert 0 < kept < small.tokens and (small.tokens - kept) % 4 == 0
    small, large = writers(folders, **{**always, "doubts": 1, "max_new_tokens": 150}, long=9)
    got = step_controllers.speculative_thinking(small, large, PROMPT, 0)
    recap = small.tokenizer(step_controllers.RECAP, add_special_tokens=False).input_ids
    assert any(got[i : i + len(recap)] == recap for i in range(len(got)))


def test_the_script_prints_a_row_for_each(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [f"{name}={path}" for name, path in folders.items()]
    step_controllers.main([*argv, "limit=2", "max_new_tokens=12", "steps=sentence"])
    told = capsys.readouterr().out
    for name in (*step_controllers.CONTROLLERS, "LOSSY"):
        assert name in told


def test_wrong_settings_say_what_to_do(folders: dict[str, str], tmp_path: Path) -> None:
    how = Controlled(**folders)
    with pytest.raises(ValueError, match=r"got steps=page .*expected steps=paragraph or sentence"):
        dataclasses.replace(how, steps="page")
    with pytest.raises(ValueError, match=r"short: got 0, expected at least 1"):
        dataclasses.replace(how, short=0)
