"""What an evaluation of tiny folders is asked."""

from pathlib import Path

from draftsmith.models.disk.provenance import provenance

MADE = provenance([], 0, None, 0)


def arguments(root: Path, out: Path, *more: str) -> list[str]:
    pair = [f"target={root / 'target'}", f"prompts={root / 'prompts.jsonl'}", f"out={out}"]
    return [*pair, "max_new_tokens=16", "ignore_eos=true", *more]
