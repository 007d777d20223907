"""A store of texts, made before the first question: what a looked-up drafter then begins with.

    draftsmith remember target=TARGET drafter=suffix data=answers.jsonl out=runs/store.safetensors
    draftsmith evaluate target=TARGET drafter=suffix:runs/store.safetensors prompts=...

suffix keeps the texts themselves (REST's datastore, He et al., arXiv 2311.08252), stand and
recycling what followed each few tokens of them (ADED's trigrams, Liu et al., arXiv 2407.12021).
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.command import check_least, parse, unknown
from draftsmith.decode.drafters.load import LOOKED, UNTRAINED
from draftsmith.decode.prompts.chat import encode
from draftsmith.decode.prompts.prompts import as_chat, prompt_ids
from draftsmith.decode.prompts.rows import Row
from draftsmith.decode.prompts.splits import load_rows
from draftsmith.decode.untrained.texts import LookupDrafter
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.tokenizer import load_tokenizer, vocab_size
from draftsmith.progress import watched


@dataclass
class Remembering:
    """What to remember, and for which drafter."""

    target: str  # whose tokenizer it is
    data: str  # rows: their answers, with what they answer; documents whole
    drafter: str = "suffix"  # suffix | recycling | stand
    split: str = "train"
    limit: int | None = None  # rows; none: all
    out: str = "runs/store.safetensors"


def main(argv: list[str]) -> None:
    settings = parse(Remembering, argv)
    check_least(settings, limit=1)
    if settings.drafter not in LOOKED:
        raise ValueError(unknown("drafter", settings.drafter, LOOKED))
    tokenizer = load_tokenizer(settings.target)
    size = vocab_size(tokenizer)
    drafter: LookupDrafter = UNTRAINED[settings.drafter](
        settings.drafter, torch.device("cpu"), size
    )
    rows, tokens = load_rows(settings.data, settings.split)[: settings.limit], 0
    for row in watched(rows, "remembering", len(rows)):
        ids = text_ids(row, tokenizer)
        drafter.remember(torch.tensor(ids))
        tokens += len(ids)
    out = Path(settings.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    drafter.save(out, fingerprint(None, tokenizer)["tokenizer"])
    print(f"{len(rows):,} rows, {tokens:,} tokens; {out}: {out.stat().st_size / 1e6:.1f} MB")
    print(f"draftsmith evaluate target={settings.target} drafter={settings.drafter}:{out}")


def text_ids(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A row's tokens: of a document all, else of prompt and answer."""
    if row.kind == "text":
        return encode(row.completion, tokenizer)
    chat = as_chat(row, tokenizer)
    answer = chat[-1].get("content") or "" if chat else row.completion
    return prompt_ids(row, tokenizer) + encode(answer, tokenizer)
