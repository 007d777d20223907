"""A draft is pretrained on what its target wrote, a folder of `prepare`, as it is on text."""

import json
from pathlib import Path

import pytest
import torch
from head_folders import on_disk
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.train import pretrain
from draftsmith.train.text.prepared import load_prepared


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    folder = tmp_path / "answers"
    folder.mkdir()
    (folder / "prepare.json").write_text(json.dumps({"schema": 1, "identity": {"requests": 9}}))
    rows = [{"index": i, "prompt_ids": [5, 6, i], "token_ids": [8 + i, 9, 10, 0]} for i in range(9)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "answers-00000-of-00001.jsonl").write_text(lines)
    return folder


def test_the_last_answers_are_held_out(answers: Path) -> None:
    whole = load_prepared(answers)
    train, kept = whole.parted(2)
    assert (len(train), len(kept)) == (7, 2)
    for part, first in ((train, 0), (kept, 7)):
        for i in range(len(part)):
            pairs = zip(part.example(i), whole.example(first + i), strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert [len(part) for part in whole.parted(100)] == [5, 4]


def test_a_draft_is_pretrained_on_them(
    answers: Path,
    tmp_path: Path,
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    target = on_disk(tmp_path / "target", tiny_target, tiny_tokenizer)
    size = "model={hidden: 16, heads: 2, kv_heads: 1, intermediate: 32}"
    said = [f"data={answers}", f"out={tmp_path / 'run'}", size, "steps=2", "batch_size=2"]
    said += ["dtype=float32", "text.max_length=16", "heldout.limit=0", "heldout_sequences=3"]
    with pytest.raises(ValueError, match=r"data: got .*answers, .* without target\.path; expected"):
        pretrain.main(said)
    pretrain.main([*said, f"target.path={target}"])
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert [record["step"] for record in records] == [0, 1, 2]
    assert "eval_loss" in records[0] and (tmp_path / "run/drafter/model.safetensors").is_file()
