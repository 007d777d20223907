"""The command line: `python -m draftsmith COMMAND key=value ...`"""

import importlib
import sys

COMMANDS = {
    "evaluate": ("draftsmith.decode.__main__", "decode with a drafter: speed, acceptance, proof"),
    "serve": (
        "draftsmith.decode.serve.server",
        "an OpenAI-compatible server, whose drafts may learn",
    ),
    "calibrate": (
        "draftsmith.decode.predict.best_tree",
        "the best static tree for a target and a drafter",
    ),
    "trace": (
        "draftsmith.decode.traces.record",
        "record what is drafted and kept, to train scorers on",
    ),
    "export": ("draftsmith.export", "write a drafter as SGLang, vLLM, TGI ... read it"),
    "doctor": ("draftsmith.doctor", "what is wrong with a drafter folder, for each server"),
    "stopping": (
        "draftsmith.decode.traces.tune_stops",
        "which rule should stop drafting, and where",
    ),
    "trim": ("draftsmith.train.trim", "draft only the tokens that the target writes"),
    "plan": ("draftsmith.train.plan.table", "memory and time of a training run, before it starts"),
    "data": ("draftsmith.train.show", "show one training example with its trained tokens coloured"),
    "size": (
        "draftsmith.decode.predict.draft_sizes",
        "depth and width of a draft by predicted speed-up",
    ),
    "scaling": (
        "draftsmith.decode.predict.scaling_laws",
        "acceptance against size and text: fits, a picture",
    ),
    "judge-labels": ("draftsmith.decode.traces.judge_labels", "tokens that a judge may let pass"),
    "quickstart": (
        "draftsmith.train.quickstart",
        "train, distil and decode on this machine's text",
    ),
}


def main() -> int:
    """Run a command; the heavy imports are made by it alone."""
    argv = sys.argv[1:]
    if not argv or argv[0] not in COMMANDS:
        wrong = f"unknown command {argv[0]!r}\n\n" if argv and not argv[0].startswith("-") else ""
        listing = "\n".join(f"  {name:<12}{what}" for name, (_, what) in COMMANDS.items())
        print(f"{wrong}python -m draftsmith COMMAND key=value ...\n\n{listing}")
        return 2 if wrong else 0
    return importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
