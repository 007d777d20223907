"""The worked example of CONTRIBUTING.md: three files make a family of heads, and nothing else."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from head_folders import on_disk
from house_rules import ROOT
from tiny_llama import build_llama
from transformers import PreTrainedTokenizerFast

from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.folder.drafter_folder import open_drafter
from draftsmith.models.heads.head import heads
from draftsmith.models.heads.medusa import Medusa
from draftsmith.models.servers.doctor import examine, outlook
from draftsmith.models.servers.export import export
from draftsmith.train import heads as heads_entry

ROOMS = ("models.heads", "decode.drafters", "train.objectives")
PROMPTS = ["row 3 0 3 6", "row 20 0 20"]


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The page's files, each in its room; their name."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    files = re.findall(r"`(\S+/)(\w+)\.py`:\n```python\n(.*?)```", text, re.DOTALL)
    assert [place for place, *_ in files] == [room.replace(".", "/") + "/" for room in ROOMS]
    assert len({name for _, name, _ in files}) == 1
    lines = [line for *_, code in files for line in code.splitlines()]
    assert len(lines) < 150 and max(map(len, lines)) <= 100
    name = files[0][1]
    for place, _, code in files:
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / f"{name}.py").write_text(code)
    for room in ROOMS:
        package = importlib.import_module(f"draftsmith.{room}")
        paths = [*package.__path__, str(tmp_path / room.replace(".", "/"))]
        monkeypatch.setattr(package, "__path__", paths)
    yield name
    for room in ROOMS:
        sys.modules.pop(f"draftsmith.{room}.{name}", None)


def test_the_worked_example_is_a_family(
    family: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    assert family in heads() and not (ROOT / f"models/heads/{family}.py").exists()
    model = build_llama(len(tiny_tokenizer), layers=2, hidden=32, seed=0)
    target = on_disk(tmp_path / "target", model, tiny_tokenizer)
    rows = (f"row {row} " + " ".join(str(row * i) for i in range(30)) for row in range(40))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in rows))

    # ---- trained by the entry ----------------------------------------------------------------
    paths = [f"target.path={target}", f"data={tmp_path / 'text.jsonl'}", f"out={tmp_path / 'run'}"]
    sizes = ["head.heads=3", "K=3", "steps=40", "batch_size=4", "lr=0.01", "eval_every=40"]
    text = ["loss=fkl", "text.max_length=40"]
    heldout = [f"heldout.{few}" for few in ("prompt_tokens=8", "max_new_tokens=8", "limit=2")]
    types = ["dtype=float32", "save_dtype=float32"]
    heads_entry.main([f"head.kind={family}", *paths, *sizes, *text, *heldout, *types])
    log = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [record["eval_loss"] for record in log if "eval_loss" in record]
    assert losses[-1] < 0.9 * losses[0]
    drafter = str(tmp_path / "run/drafter")

    # ---- decodes what plain decoding does ----------------------------------------------------
    plain = Decoder.from_pretrained(target, dtype="float32")
    decoder = Decoder.from_pretrained(target, drafter, dtype="float32", K=3)
    tree = Decoder.from_pretrained(target, drafter, dtype="float32", tree="dynamic:3,2,6")
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature, max_new_tokens=16, seed=5)
        wanted = [answer.tokens for answer in plain.generate(PROMPTS, params)]
        for drafting in (decoder, tree):
            assert [answer.tokens for answer in drafting.generate(PROMPTS, params)] == wanted

    # ---- examined, exported, and read there --------------------------------------------------
    layout, findings = examine(drafter, target)
    said = outlook(layout, findings)
    assert layout == family and all(found.verdict != "fault" for found in findings), findings
    assert said["draftsmith"] == "reads it" and said["TGI"] == "after export to=tgi"
    line = export(drafter, target, "tgi", str(tmp_path / "exported"))
    assert line == f"text-generation-launcher --model-id {tmp_path / 'exported'}"
    assert outlook(*examine(str(tmp_path / "exported"), target))["TGI"] == "reads it"
    with pytest.warns(UserWarning, match="in the layout of Medusa"):
        there = open_drafter(tmp_path / "exported", None).head()
    ours = open_drafter(drafter, None).head()
    assert isinstance(there, Medusa)
    norm_1H = torch.randn(1, 32)
    for depth, state_1H in enumerate(there.states(norm_1H)):
        assert torch.equal(state_1H, norm_1H)
        assert torch.equal(there.head_VH(depth), ours.head_VH(depth))
