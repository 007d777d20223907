"""A run that trains a draft LM to draft several tokens in a pass, on a tiny random target."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.decode.draft_lms.pard import PardDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.models.disk.store import read_lines
from draftsmith.models.servers.export import serve_line
from draftsmith.train import distill
from draftsmith.train.plan.table import plan

BARE = "pard.levels=0"


def test_a_draft_learns_to_draft_in_one_pass(
    tmp_path: Path,
    corpus: Path,
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Behind MASKs it knows nothing at first; its folder says so to the decoder and to servers, and
    another run goes on with the same MASK.
    """
    target, folder = tmp_path / "target", tmp_path / "run/drafter"
    for part in (tiny_target, tiny_tokenizer):
        part.save_pretrained(target)
    same = ["dtype=float32", f"target.path={target}", f"data={corpus}", "batch_size=2", "K=3"]
    same += ["text.max_length=40", "heldout={limit: 2, prompt_tokens: 8, max_new_tokens: 8}"]
    same += ["pard.levels=3"]
    fresh = ["draft={hidden: 32, heads: 2, kv_heads: 1, intermediate: 32}"]
    long = ["steps=60", "lr=0.02", "eval_every=30", "best_metric=ahead"]
    distill.main([*same, *fresh, *long, f"out={tmp_path / 'run'}"])
    log = read_lines(tmp_path / "run/metrics.jsonl")
    ahead = [record["eval_ahead"] for record in log if "eval_ahead" in record]
    assert len(ahead) == 3 and max(ahead) > ahead[0] + 0.02
    config = json.loads((folder / "config.json").read_text())
    assert (config["pard_token"], config["para_num"]) == (tiny_tokenizer.pad_token_id, 3)
    decoder = Decoder.from_pretrained(str(target), str(folder), dtype="float32")
    assert isinstance(decoder.drafter, PardDrafter)
    first, *lines = serve_line(folder, str(target)).splitlines()
    assert '"parallel_drafting": true' in first and "vllm serve" in first
    assert [line for line in lines if "mask_token_id" in line and "PARD" in line]
    asked = ["entry=distill", "gpu=cpu", *same, *fresh, "steps=1", f"out={tmp_path / 'planned'}"]
    planned = [plan([*asked, *more]) for more in ([], [BARE])]
    passes, bare = (one.choices[0].held.step for one in planned)
    assert passes > 1.1 * bare, "of text and MASKs"
    again = [*same, "steps=1", f"draft={folder}", f"out={tmp_path / 'second'}"]
    with pytest.raises(ValueError, match="would unlearn them"):
        distill.main([*again, BARE])
    with pytest.raises(ValueError, match="got K=4, expected at most pard"):
        distill.main([*again, "K=4"])
    distill.main(again)
    second = json.loads((tmp_path / "second/drafter/config.json").read_text())
    assert second["pard_token"] == config["pard_token"]
