"""The page of the heads' comparison, made from rows whose answers are known."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import head_folders
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.bench.evidence import head_page

ROOT = Path(__file__).resolve().parents[2]


def rows() -> list[dict[str, Any]]:
    """Two kinds, two seeds, four prompts of ten rounds: eagle3 emits one token more each."""
    trees = {"chain": 5, "static": 24, "dynamic": 24, "dynamic, sharpness 2": 24}
    found = []
    for kind, more, ms in (("medusa", 0, 1.0), ("eagle3", 10, 2.0)):
        for seed in (0, 1):
            about = {"what": kind, "seed": seed, "target": "t", "data": "d", "temperature": 0.0}
            about |= {"n_prompts": 4, "max_new_tokens": 64, "rounds": [10] * 4}
            about |= {"commit": "c", "command": "python bench/evidence/heads.py", "machine": "m"}
            for at, (tree, nodes) in enumerate(trees.items()):
                emitted = [20 + more + 5 * at + seed] * 4
                found.append(
                    about
                    | {
                        "tree": tree,
                        "K": 4,
                        "N": nodes,
                        "emitted": emitted,
                        "tau": sum(emitted) / 40,
                    }
                    | {"draft_ms": 4 * ms, "acceptance_conditional": [0.5, 0.25 + 0.25 * seed]}
                )
            for depth in (1, 2, 4, 8):
                chain = {"tree": f"chain {depth}", "K": depth, "N": depth + 1}
                chain["draft_ms"] = depth * ms
                emitted = [10 + more + depth] * 4
                found.append(about | chain | {"emitted": emitted, "tau": sum(emitted) / 40})
    return found


def test_the_page_says_what_the_rows_say() -> None:
    text = head_page.page(rows())
    # Summed over seeds: (20 + 21) / 20; every prompt alike, so the interval has no width.
    assert "| medusa | 2.05 [2.05, 2.05] (2.00 to 2.10) |" in text
    assert "| eagle3 | 0.500 | 0.375 |" in text
    # eagle3's four tokens take 8 ms, medusa drafts eight in that time.
    assert "| medusa | 8 | 8.00 | 1.80" in text
    assert "| eagle3 | 4 | 8.00 | 2.40" in text
    assert "- eagle3 - medusa, chain: +1.00 [+1.00, +1.00]" in text
    assert "- medusa: static - chain: +0.50 [+0.50, +0.50]" in text


def test_differences_that_may_be_chance_are_said_to_be() -> None:
    found = rows()
    for r in found:
        if r["what"] == "eagle3" and r["tree"] == "chain":
            r["emitted"] = [40, 0, 41, 1]
    text = head_page.page(found)
    assert "eagle3 - medusa, chain: -0.00" in text or "eagle3 - medusa, chain: +0.00" in text
    line = next(line for line in text.splitlines() if "eagle3 - medusa, chain" in line)
    assert line.endswith("not told apart")


@pytest.mark.slow
def test_trained_heads_are_measured(
    tmp_path: Path, tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Heads that stand already, of three tokens ahead and of any depth: trees are cut to fit."""
    target = head_folders.on_disk(tmp_path / "target", tiny_target, tiny_tokenizer)
    for what in ("medusa", "eagle3"):
        folder = tmp_path / "trained" / f"{what}-0" / "drafter"
        head_folders.ours(folder, head_folders.made(what, tiny_target), tiny_target, tiny_tokenizer)
        (folder.parent / "metrics.jsonl").write_text('{"step": 1, "seconds": 2.5}\n')
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def main(\nimport os, sys\n")
    where = [f"target={target}", f"data={prompts}", f"out={tmp_path}", "kinds=medusa,eagle3"]
    few = ["seeds=1", "prompts=2", "max_new_tokens=6", "deepest=2"]
    command = [
        sys.executable,
        "bench/evidence/heads.py",
        *where,
        *few,
        f"trained={tmp_path / 'trained'}",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found = json.loads((tmp_path / "heads.json").read_text())
    arms = {(r["what"], r["tree"], r["temperature"]) for r in found}
    trees = ("chain", "static", "dynamic", "dynamic, sharpness 2", "chain 1", "chain 2")
    assert arms == set(itertools.product(("medusa", "eagle3"), trees, (0.0, 1.0)))
    assert {(r["what"], r["K"]) for r in found if r["tree"] == "chain"} == {
        ("medusa", 3),
        ("eagle3", 4),
    }
    for r in found:
        assert 1 <= r["tau"] <= r["K"] + 1 and r["draft_ms"] > 0
    assert (tmp_path / "heads.md").read_text() == head_page.page(found)
