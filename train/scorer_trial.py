"""What target.shrink=true puts in the place of traces: a few, of a tiny random target and draft."""

from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator

from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine import Decoder
from draftsmith.decode.recorder import Columns, Recorder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.traces import TraceWriter
from draftsmith.models.drafter_folder import save_drafter
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.scorers import weights_mark
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.train.draft import TINY, Sizes, fresh_draft

PROMPTS = 40  # enough that each part of them has some
JUDGED = ("position", "token", "kept", "target_state")


class Trial(Protocol):
    """The part of a recipe that is tried; drafter and traces are set to what was made."""

    kind: str
    target: TargetSpec
    drafter: str
    traces: list[str]


def write_trial(folder: Path, trial: Trial, accelerator: Accelerator) -> None:
    """A drafter folder and traces of it, by the main process alone."""
    drafter, traces = folder / "drafter", folder / "traces"
    trial.drafter = "" if trial.kind == "judge" else str(drafter)
    trial.traces = [str(traces)]
    if accelerator.is_main_process:
        record(drafter, traces, trial)
    accelerator.wait_for_everyone()


def record(drafter: Path, traces: Path, trial: Trial) -> None:
    """Decode a few prompts with a random draft.

    A judge's rows are labelled by the rule, which is no judge: they only show that a recipe runs.
    """
    kind = trial.kind
    target, tokenizer = load_target(trial.target, "cpu")
    sizes = Sizes(**{name: TINY[name] for name in Sizes.__dataclass_fields__ if name in TINY})
    marks = fingerprint(target, tokenizer)
    save_drafter(
        drafter,
        kind="lm",
        model=fresh_draft(sizes, target, tokenizer, seed=0),
        tokenizer=tokenizer,
        target_fingerprint=marks,
        provenance={},
        defaults={},
    )
    about: dict[str, Any] = {"kind": "judge" if kind == "judge" else "decoder", "target": marks}
    about["drafter"] = {"path": str(drafter), "kind": "lm", "mark": weights_mark(drafter)}
    writer = TraceWriter(traces, about | {"settings": {}}, max_bytes=1 << 30)

    def keep(index: int, columns: Columns) -> None:
        names = JUDGED if kind == "judge" else tuple(columns)
        if index not in writer.done:
            writer.add(index, {name: columns[name] for name in names})

    decoder = Decoder(
        target,
        tokenizer,
        load_drafter(str(drafter), target, tokenizer),
        Recorder(keep),
        K=3,
        batch_size=PROMPTS,
    )
    # Random models say almost the same of every token: cold, they disagree.
    params = SamplingParams(temperature=0.1, max_new_tokens=12)
    decoder.generate([f"{i} and" for i in range(PROMPTS)], params)
    writer.close()
