"""The benchmark against transformers runs on a pair of folders and writes what it promises."""

import json
import xml.dom.minidom
from pathlib import Path

import pytest
from forked import Forked, run
from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[2]
FIELDS = ["what", "peer", "ratio", "ratio_min", "ratio_max", "pairs", "ours", "theirs", "unit"]
FIELDS += ["commit", "command", "machine"]


@pytest.fixture
def pair(
    tmp_path: Path,
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    """Arguments that name a pair, a few prompts of different lengths, and small sizes."""
    for name, model in (("target", tiny_target), ("drafter", tiny_draft)):
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
    texts = tmp_path / "prompts.txt"
    texts.write_text("def main(\nimport os, sys\nfor x in range(3): print(x)\n")
    where = [f"{name}={tmp_path / name}" for name in ("target", "drafter")]
    return [*where, f"prompts={texts}", f"out={tmp_path}", "limit=2", "max_new_tokens=8"]


def bench(*arguments: str) -> Forked:
    return run(["bench/speed/decode.py", *arguments], cwd=ROOT)


@pytest.mark.slow
def test_bench_compares_every_arm_and_writes_rows_page_and_picture(
    tmp_path: Path, pair: list[str]
) -> None:
    done = bench(*pair, "K=2", "batches=3")
    assert done.returncode == 0, done.err[-2000:]
    rows = json.loads((tmp_path / "decode.json").read_text())
    assert all(list(r) == FIELDS and r["ratio_min"] <= r["ratio"] <= r["ratio_max"] for r in rows)
    assert all(r["ours"] > 0 and r["theirs"] > 0 for r in rows)
    compared = {(r["what"], r["peer"]) for r in rows}
    assert {
        ("plain", "generate"),
        ("chain K=2", "assisted K=2"),
        ("prompt lookup", "prompt lookup"),
        ("tau, tree eagle-25, equal draft calls", "chain K=2"),
        ("efficiency, chain K=2", "ideal speed-up"),
        ("plain, batch 3", "generate, padded"),
        ("chain K=2, batch 3", "generate, padded"),
    } <= compared
    best = {peer for _, peer in compared if peer.startswith("assisted")} - {"assisted K=2"}
    assert len(best) == 1 and {"chain K=2", "tree eagle-25", "policy cost"} <= {
        what for what, peer in compared if peer in best
    }
    page = (tmp_path / "decode.md").read_text()
    assert all(r["what"] in page for r in rows)
    picture = xml.dom.minidom.parse(str(tmp_path / "decode.svg")).documentElement
    drawn = "".join(node.toxml() for node in picture.getElementsByTagName("text"))
    assert all(f"{name}<" in drawn for name in ("ours plain", "generate", "assisted dynamic"))


def test_a_missing_pair_is_named(tmp_path: Path) -> None:
    done = bench(f"target={tmp_path / 'none'}")
    assert done.returncode == 2
    assert f"{tmp_path / 'none'}; run first: draftsmith quickstart" in done.err
