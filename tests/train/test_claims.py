"""What the README claims of the quickstart, run in full: about ten minutes on two cores."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftsmith.decode.evaluate.metrics import paired_difference
from draftsmith.train.quickstart import best_loss, sums_and_counts

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> None:
    """Like `make`: on one thread where models are tiny, asleep while waiting."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def reports(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    return {
        (arm, t): json.loads((folder / arm / ("t1" if t else "") / "report.json").read_text())
        for arm in ("before", "after", "ngram")
        for t in (0, 1)
    }


def check_quickstart(folder: Path) -> None:
    found = reports(folder)
    for t in (0, 1):
        before, after, ngram = (found[arm, t] for arm in ("before", "after", "ngram"))
        gain, (low, _) = paired_difference(*(sums_and_counts(x, "alpha") for x in (after, before)))
        assert gain >= 0.03
        assert low > 0
        _, (low, _) = paired_difference(*(sums_and_counts(x, "tau") for x in (after, before)))
        assert low > 0
        for report in (before, after, ngram):
            same = report["identical"]
            assert same["same"] + same["excused"] == same["total"] == report["n_prompts"]
        if t == 1:
            assert after["tau_interval"][0] > ngram["tau_interval"][1]
        else:
            assert after["speedup_interval"][0] > 1.2
    assert best_loss(folder / "draft") - best_loss(folder / "target") >= 0.3


def check_bench(file: Path) -> None:
    rows = json.loads(file.read_text())
    ratio = {(row["what"], row["peer"]): row["ratio"] for row in rows}
    assert ratio["plain", "generate"] >= 1.4
    # Our fastest arm against assisted generation at its best setting.
    assert max(r for (_, peer), r in ratio.items() if peer.startswith("assisted")) >= 1.8
    assert next(r for (what, _), r in ratio.items() if what.startswith("tau")) > 1
    # How much of the ideal is reached is told, not asked: a round of this pair takes 0.7 ms, of
    # which 0.12 are the loop's, and the ideal knows none.
    assert ratio["chain K=4", "ours plain"] > 1


@pytest.mark.slow
def test_the_quickstart_keeps_its_promises(tmp_path: Path) -> None:
    folder = tmp_path / "quickstart"
    run("-m", "draftsmith", "quickstart", f"out={folder}")
    check_quickstart(folder)
    pair = [f"target={folder / 'target/model'}", f"drafter={folder / 'distill/drafter'}"]
    run("bench/speed/decode.py", *pair, "threads=1", f"out={tmp_path}")
    check_bench(tmp_path / "decode.json")
