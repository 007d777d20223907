"""Commands of the pages that are really run, in their order, on a tiny model: the slow suite."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import commands
from house_rules import ROOT
from transformers import PreTrainedModel, PreTrainedTokenizerBase

FEW = "max_new_tokens=8 limit=40"
BRIEF = "steps=2 warmup=0 heldout.limit=1 heldout.max_new_tokens=4"
# Page, how its command begins, what makes it short, a file or words that it leaves.
RUN = [
    ("start/four_commands.md", "draftsmith prepare", FEW, "runs/answers/prepare.json"),
    ("start/four_commands.md", "draftsmith data show", "index=1", ""),
    ("start/four_commands.md", "draftsmith train eagle", BRIEF, "runs/eagle/drafter/config.json"),
    ("start/choose.md", "draftsmith evaluate", FEW, "runs/evaluate/suffix/report.html"),
    ("start/four_commands.md", "draftsmith evaluate", FEW, "runs/evaluate/report.html"),
    ("use/export.md", "draftsmith export drafter=runs/eagle/drafter target=TARGET to=spec", "", ""),
    ("use/export.md", "draftsmith doctor", "", ""),
    ("methods/lookups.md", "draftsmith remember", "", "runs/store.safetensors"),
    ("methods/scorers.md", "draftsmith trace", "limit=8 max_new_tokens=8", "runs/trace/trace.json"),
    ("methods/skipped_layers.md", "draftsmith skip-layers", "limit=2 max_new_tokens=8", ""),
]
WORDS = {"TARGET": "my-model", "DRAFTER": "runs/eagle/drafter", "answers.jsonl": "prompts.jsonl"}


@pytest.mark.slow
def test_commands_of_the_pages_run(
    tmp_path: Path, tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    tiny_target.save_pretrained(tmp_path / "my-model")
    tiny_tokenizer.save_pretrained(tmp_path / "my-model")
    rows = [{"prompt": f"What is {i} and {i}?", "completion": f"{2 * i}."} for i in range(60)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for page, begins, more, leaves in RUN:
        written = [c for c in commands(ROOT / "docs" / page) if c.text.startswith(begins)]
        assert written, f"{page} has no command {begins}"
        words = [*written[0].words(), *more.split()]
        names = {"".join(word.partition("=")[:2]): word for word in words[1:]}  # the last one holds
        for word, here in WORDS.items():
            names = {name: text.replace(word, here) for name, text in names.items()}
        command = [sys.executable, "-m", "draftsmith", *names.values()]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, f"{page}: {command[3:]}: {run.stderr[-2000:]}"
        assert not leaves or (tmp_path / leaves).is_file(), f"{page}: {leaves}: {run.stdout}"
