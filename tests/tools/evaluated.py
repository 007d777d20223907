"""What an evaluation of tiny folders is asked."""

import json
from pathlib import Path

from saved_drafts import save_draft
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.disk.provenance import provenance

MADE = provenance([], 0, None, 0)


def arguments(root: Path, out: Path, *more: str) -> list[str]:
    pair = [f"target={root / 'target'}", f"prompts={root / 'prompts.jsonl'}", f"out={out}"]
    pair += [] if any(word.startswith("advice=") for word in more) else ["advice=false"]
    return [*pair, "max_new_tokens=16", "ignore_eos=true", *more]


def save_pair(
    root: Path,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """A target, two drafters of it (`draft`, and `itself`, which is always right), six prompts."""
    target.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    for name, model in (("draft", draft), ("itself", target)):
        save_draft(root / name, model, target, tokenizer, provenance=MADE, defaults={"K": 3})
    rows = [{"prompt": f"def f{i}(x):", "category": "abc"[i % 3]} for i in range(6)]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
