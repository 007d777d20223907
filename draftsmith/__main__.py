"""The command line: `draftsmith COMMAND key=value ...`, or `python -m draftsmith COMMAND ...`"""

import importlib
import os
import sys
from functools import partial

import draftsmith
from draftsmith.command import asks_manual, guarded, unknown
from draftsmith.launch import launch
from draftsmith.manual import file_of, manual, of_module

# Command: its module, the class of its settings, what it does.
COMMANDS = {
    "prepare": ("train.prepare", "Prepare", "answers of the target, to train on"),
    "train pretrain": ("train.pretrain", "PretrainConfig", "a causal LM, or a draft to begin with"),
    "train distill": ("train.distill", "DistillConfig", "a draft LM, from its target"),
    "train heads": ("train.heads", "HeadsConfig", "Medusa and Hydra heads on a frozen target"),
    "train eagle": ("train.eagle", "EagleRun", "EAGLE-1 and EAGLE-3 heads on a frozen target"),
    "train blocks": ("train.blocks", "BlocksRun", "drafters of a block a pass: DFlash, DSpark ..."),
    "train tune": ("train.tune", "TuneConfig", "the target itself, so that it drafts for itself"),
    "train scorers": ("train.scorers", "ScorersConfig", "acceptance heads and judges, from traces"),
    "train online": ("train.online", "OnlineRun", "a draft, from what its server decodes"),
    "evaluate": ("decode.__main__", "Evaluation", "decode with a drafter: speed, proof"),
    "serve": ("decode.serve.server", "ServerConfig", "an OpenAI-compatible server"),
    "export": ("export", "Export", "write a drafter as SGLang, vLLM, TGI ... read it"),
    "push": ("push", "Push", "a drafter with its model card onto the hub"),
    "doctor": ("doctor", "Doctor", "what is wrong with a drafter folder, for each server"),
    "trim": ("train.trim", "Trim", "draft only the tokens that the target writes"),
    "compare": ("train.compare", "KindsCompared", "which drafter to train: all, side by side"),
    "calibrate": ("decode.predict.best_tree", "Calibration", "the best static tree for a draft LM"),
    "remember": ("decode.traces.fill_store", "Remembering", "texts to look drafts up in"),
    "skip-layers": ("decode.predict.best_layers", "LayerSearch", "layers that a draft leaves out"),
    "trace": ("decode.traces.record", "Tracing", "record drafts and what is kept, for scorers"),
    "stopping": ("decode.traces.tune_stops", "Stopping", "which rule should stop drafting"),
    "simulate": (
        "decode.predict.simulate",
        "Simulation",
        "what scheduling drafts gives under load",
    ),
    "judge-labels": ("decode.traces.judge_labels", "Labels", "tokens that a judge may let pass"),
    "plan": ("train.plan.table", "PlanRequest", "memory and time of a training run, beforehand"),
    "size": ("decode.predict.draft_sizes", "Sizing", "depth and width of a draft by its speed-up"),
    "predict": ("decode.predict.predict", "Prediction", "what each kind of drafter would give"),
    "scaling": ("decode.predict.scaling_laws", "Scaling", "acceptance against size and text: fits"),
    "data show": ("train.show", "Show", "one training example, its trained tokens coloured"),
    "quickstart": ("train.quickstart", "Quickstart", "the main job on this machine's text"),
}
LAUNCHED = ("prepare", "train ")
EXTRAS = {"fastapi": "serve", "uvicorn": "serve", "prometheus_client": "serve"}
ENDS = """`draftsmith COMMAND --help` lists its keys: key=value or --key value. Also: --version.
Exit codes: 0 done, 1 failed, 2 an error of yours (one line on stderr), 130 interrupted."""


def main() -> int:
    """Run a command; the heavy imports are made by it alone, and none for its manual."""
    argv = sys.argv[1:] or ["help"]
    name = next((name for name in COMMANDS if argv[: len(name.split())] == name.split()), "")
    rest = argv[len(name.split()) :]
    if not name and asks_manual(argv[:1]):
        print(listing())
    elif argv == ["--version"]:
        print(f"draftsmith {draftsmith.__version__}")
    elif name and asks_manual(rest):
        place, schema, _ = COMMANDS[name]
        launched = of_module("draftsmith.launch").keys("Launch")
        before = launched if name.startswith(LAUNCHED) else []
        print(manual(file_of(f"draftsmith.{place}"), schema, before=before))
    elif begun(argv[0]) and asks_manual(argv[1:]):
        print(listing(f"{argv[0]} "))
    else:
        return guarded(partial(command, name), rest, partial(keys_of, name))
    return 0


def keys_of(name: str) -> list[str]:
    """Of a command's settings."""
    place, schema, _ = COMMANDS[name]
    return [key.name for key in of_module(f"draftsmith.{place}").keys(schema)]


def begun(word: str) -> bool:
    """Whether commands of two words begin so."""
    return any(name.startswith(f"{word} ") for name in COMMANDS)


def listing(word: str = "") -> str:
    """What there is, or what begins so."""
    found = {name: what for name, (_, _, what) in COMMANDS.items() if name.startswith(word)}
    lines = [f"  {name:<16}{what}" for name, what in found.items()]
    return "\n".join(["draftsmith COMMAND key=value ...", "", *lines, "", ENDS])


def command(name: str, argv: list[str]) -> int | None:
    """Run a command. Raises ValueError for one that there isn't, and what the command raises."""
    if not name:
        raise ValueError(unknown("command", " ".join(argv[: 1 + begun(argv[0])]), COMMANDS))
    place = f"draftsmith.{COMMANDS[name][0]}"
    # Before torch comes, whose threads else wait awake for long on the cores that ours need.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if name.startswith(LAUNCHED):
        return launch(place, argv)
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        extra = f"pip install 'draftsmith[{EXTRAS[error.name]}]'"
        raise ValueError(f"{name}: got no package {error.name}, expected it: {extra}") from error
    return module.main(argv)


if __name__ == "__main__":
    sys.exit(main())
