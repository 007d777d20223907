"""The benchmark of the bounded losses runs and writes what it promises."""

import json
from pathlib import Path

from forked import run

ROOT = Path(__file__).resolve().parents[2]


def test_bench_measures_and_writes_its_rows(tmp_path: Path) -> None:
    command = ["bench/speed/losses.py", "--quick", "--losses", "fkl", "--out", str(tmp_path)]
    small = ["--rows", "64", "--vocabulary", "2000", "--hidden", "16"]
    done = run([*command, *small], cwd=ROOT)
    assert done.returncode == 0, done.told
    rows = json.loads((tmp_path / "losses.json").read_text())
    fields = ["what", "peer", "ratio", "ratio_min", "ratio_max", "pairs", "ours", "theirs", "unit"]
    fields += ["commit", "command", "machine"]
    assert rows and all(list(row) == fields for row in rows)
    assert {row["unit"] for row in rows} == {"MiB", "s"}
    for row in rows:
        assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
        assert row["ratio_min"] > 0
