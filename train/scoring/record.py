"""Rounds of models at hand, recorded for a scorer; and a joint head's last part, made of them.

For a drafter and a target by their names there is `python -m draftsmith trace`.
"""

from collections.abc import Mapping
from dataclasses import asdict
from itertools import count, islice
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.recorder import Columns, Recorder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.traces.store import TraceWriter
from draftsmith.models.disk.atomic import whole_folder
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.scorers import FOLDER, Scorer, save_scorer, weights_mark
from draftsmith.models.target import TargetSpec
from draftsmith.train.objectives.heldout import prompts_for_development
from draftsmith.train.run.folder import Run
from draftsmith.train.scoring.result import THRESHOLDS, calibrate, describe, next_command, show
from draftsmith.train.scoring.rows import (
    TRACED,
    Reading,
    expected_marks,
    part,
    read_rows,
    traced_settings,
)

JUDGED = ("position", "token", "kept", "target_state")
KEPT_APART = ("calibrate", "check")
DRAFTED = 8  # tokens a round: a policy may draft as deep
ROWS = 40  # decoded together


def record(
    folder: Path,
    drafter: Path,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Mapping[int, str | list[int]],
    params: SamplingParams,
    *,
    kind: str = "decoder",
) -> None:
    """A trace of a draft LM's rounds on prompts by their numbers, with the columns that scorers of
    this kind of trace read.

    What an interrupted one has left is kept.
    """
    about: dict[str, Any] = {"kind": kind, "target": fingerprint(target, tokenizer)}
    about["drafter"] = {"path": str(drafter), "kind": "lm", "mark": weights_mark(drafter)}
    settings = {"rule": "coupled", "tree": "chain", **asdict(params)}
    about["settings"] = {name: settings[name] for name in TRACED}
    writer = TraceWriter(folder, about, max_bytes=1 << 30)
    left = [number for number in prompts if number not in writer.done]

    def keep(place: int, columns: Columns) -> None:
        names = JUDGED if kind == "judge" else columns.keys() - {"target_state"}
        writer.add(left[place], {name: columns[name] for name in names})

    loaded, rows = load_drafter(str(drafter), target, tokenizer), min(ROWS, len(prompts))
    decoder = Decoder(target, tokenizer, loaded, Recorder(keep), K=DRAFTED, batch_size=rows)
    decoder.generate([prompts[number] for number in left], params, left)
    writer.close()


class Finishing(Protocol):
    """What `finish_head` reads of a recipe."""

    target: TargetSpec
    data: str
    heldout_data: str
    head_prompts: int
    prompt_tokens: int

    @property
    def warp(self) -> SamplingParams: ...


def finish_head(
    config: Finishing,
    run: Run,
    result: Path,
    scorer: Scorer,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    made: dict[str, Any],
) -> None:
    """Calibrate a trained head on rounds of the saved drafter `result`, check it on others, and
    save it there. By one process alone.

    The prompts are held out, of the part that choices are made on; half of them calibrate.

    Raises:
        ValueError: rounds that kept all, or nothing: there is no class to tell from the other.
    """
    asks = prompts_for_development(
        config.heldout_data or config.data,
        tokenizer,
        count=config.head_prompts,
        length=config.prompt_tokens,
    )
    numbers = islice((n for n in count() if part(n) in KEPT_APART), len(asks))
    trace = run.cache / "rounds"
    record(trace, result, target, tokenizer, dict(zip(numbers, asks, strict=True)), config.warp)
    reading = Reading(
        kind="acceptance",
        target=config.target,
        drafter=str(result),
        traces=[str(trace)],
        reads="parent",
        scalars=list(scorer.config.scalars),
    )
    made_for, mark = expected_marks(reading)
    parts, counts = read_rows(reading, made_for, mark, KEPT_APART)
    scorer = scorer.cpu().float().eval()
    before, after = calibrate(scorer, *(parts[name] for name in KEPT_APART))
    about = describe(mark or "", before, after, THRESHOLDS["acceptance"], made | {"rows": counts})
    about |= {"traced": traced_settings(reading.traces), "target": made_for}
    with whole_folder(result / FOLDER) as half:
        save_scorer(half, scorer, about)
    show(run.folder, before, after)
    print(next_command("acceptance", config.target.path, result, about["threshold"]))
