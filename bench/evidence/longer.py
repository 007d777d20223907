"""What the table of long contexts needs: a target with room for them, and texts as long.

    python bench/evidence/longer.py                    # runs/long: sixteen times the 15M target's
    draftsmith train pretrain recipe=long/target       # trains it there

The copy has the target's weights and rotary embeddings scaled by YaRN (arXiv 2309.00071), so that
`factor` times as many positions turn as the target's own do. Texts are GSM8K's solved problems one
after another, as a prompt of many examples has them; those of the second file are in none of the
first. <out>/start, <out>/train.jsonl, <out>/prompts.jsonl
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from draftsmith.bench.reproduce import need
from draftsmith.command import parse, run_command
from draftsmith.decode.prompts.rows import Row
from draftsmith.decode.prompts.splits import load_rows
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.train.run.recipe import gsm8k


@dataclass(kw_only=True)
class Longer:
    target: str = field(default_factory=lambda: gsm8k("target"))
    data: str = field(default_factory=lambda: gsm8k("data"))
    factor: int = 16  # of the target's context
    document: int = 250  # problems
    kept: float = 0.3  # share of the problems that only prompts are made of
    out: str = "runs/long"


def main(argv: list[str]) -> None:
    settings = parse(Longer, argv)
    need("target", settings.target)
    out = Path(settings.out)
    target, tokenizer = load_target(TargetSpec(settings.target, dtype="float32"), "cpu")
    config = target.config
    rope = config.rope_parameters
    if settings.factor < 2 or rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"got factor={settings.factor} and rope_parameters={rope}, expected a factor of 2 or "
            "more and plain rotary embeddings; give another target"
        )
    own = config.max_position_embeddings
    config.max_position_embeddings = own * settings.factor
    config.rope_parameters = rope | {
        "rope_type": "yarn",
        "factor": float(settings.factor),
        "original_max_position_embeddings": own,
    }
    target.save_pretrained(out / "start")  # rotations aren't saved: they are made from the config
    tokenizer.save_pretrained(out / "start")
    rows = load_rows(settings.data, "all")
    first = round(len(rows) * (1 - settings.kept))
    for name, some in (("train", rows[:first]), ("prompts", rows[first:])):
        texts = documents(some, settings.document)
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (out / f"{name}.jsonl").write_text(lines)
        print(f"{out / name}.jsonl: {len(texts)} documents of {settings.document} problems")


def documents(rows: list[Row], many: int) -> list[str]:
    """`many` solved problems each, fewer in the last."""
    texts = [f"Question: {row.prompt}\nAnswer: {row.completion}" for row in rows]
    return ["\n\n".join(texts[at : at + many]) for at in range(0, len(texts), many)]


if __name__ == "__main__":
    run_command(main, Longer)
