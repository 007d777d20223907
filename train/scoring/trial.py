"""What target.shrink=true puts in the place of traces: a few, of a tiny random target and draft."""

from pathlib import Path
from typing import Protocol

from accelerate import Accelerator

from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import save_drafter
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.train.drafts.draft_start import TINY, Sizes, fresh_draft
from draftsmith.train.scoring.record import record

PROMPTS = 40  # enough that each part of them has some


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
        decode(drafter, traces, trial)
    accelerator.wait_for_everyone()


def decode(drafter: Path, traces: Path, trial: Trial) -> None:
    """Decode a few prompts with a random draft.

    A judge's rows are labelled by the rule, which is no judge: they only show that a recipe runs.
    """
    target, tokenizer = load_target(trial.target, "cpu")
    sizes = Sizes(**{name: TINY[name] for name in Sizes.__dataclass_fields__ if name in TINY})
    save_drafter(
        drafter,
        kind="lm",
        model=fresh_draft(sizes, target, tokenizer, seed=0),
        tokenizer=tokenizer,
        target_fingerprint=fingerprint(target, tokenizer),
        provenance={},
        defaults={},
    )
    # Random models say almost the same of every token: cold, they disagree.
    params = SamplingParams(temperature=0.1, max_new_tokens=12)
    prompts = {i: f"{i} and" for i in range(PROMPTS)}
    kind = "judge" if trial.kind == "judge" else "decoder"
    record(traces, drafter, target, tokenizer, prompts, params, kind=kind)
