"""Drafts that are looked up: no answer changes, whatever a store holds; a look-up finds what a scan
finds; a table holds what the target said.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_drafts import VOCAB, counting
from evaluated import arguments, save_pair
from looked_up import tau, texts
from rounds import reads_nothing, records, started
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, changes_nothing, truths

from draftsmith.decode import __main__ as evaluation
from draftsmith.decode.drafters.eagle import EagleDrafter
from draftsmith.decode.drafters.load import has_folder, load_drafter
from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.traces import fill_store
from draftsmith.decode.untrained.composite import CompositeDrafter
from draftsmith.decode.untrained.texts import LookupDrafter
from draftsmith.models.fingerprint import fingerprint

NAMES = ["suffix", "recycling", "stand"]
TREES: list[dict[str, Any]] = [
    {"K": 6},
    {"tree": "eagle-25", "K": 3},
    {"tree": "dynamic:4,3,9"},
    {"tree": "dynamic:4,3,9", "policy": "depth:0.3"},
]
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", NAMES)
def test_no_answer_changes(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """Rows come and go, and what earlier prompts left behind stays; then it is forgotten."""
    drafter = load_drafter(name, tiny_target, tiny_tokenizer)
    assert drafter is not None and not has_folder(name)
    pair = tiny_target, tiny_tokenizer
    for tree, batch in zip(TREES, (3, 1, 16, 3), strict=True):
        changes_nothing(pair, drafter, [(tree, batch, SETTINGS)])
        drafter.forget()
    changes_nothing(pair, drafter, [(TREES[0], 3, SETTINGS[:1])])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_its_law_serves_rules_by_rejection(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, name: str, rule: str
) -> None:
    """Answers differ there, and are whole: the law of all rounds is checked for any q elsewhere."""
    drafter = load_drafter(name, tiny_target, tiny_tokenizer)
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, rule=rule, tree="eagle-25", K=3)
    done = decoder.generate(PROMPTS, SETTINGS[1])
    assert all(c.finish_reason in ("length", "stop") for c in done)
    assert sum(c.counters.nodes for c in done) > 0


@pytest.mark.parametrize("name", [*NAMES, "suffix+"])
@pytest.mark.parametrize("tree", ["chain", "dynamic:3,3,9"])
def test_a_round_that_reads_nothing_can_be_recorded(
    tiny_tokenizer: PreTrainedTokenizerBase, name: str, tree: str
) -> None:
    target, head = counting(wrong=0.35)
    looked = load_drafter(name.strip("+"), target, tiny_tokenizer)
    assert isinstance(looked, LookupDrafter)
    looked.reads, looked.store.made = False, None  # as on a GPU
    drafter: Drafter = looked
    if name.endswith("+"):
        drafter = CompositeDrafter(looked, EagleDrafter(head, target, VOCAB), 3)
    params = SETTINGS[1]
    decoder = Decoder(target, tiny_tokenizer, drafter, tree=tree)
    reads_nothing(decoder, started(decoder, params))
    records((target, tiny_tokenizer), drafter, params, tree=tree)


# --- stores on the disk


def test_a_store_is_filled_saved_and_begun_with(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """By the command, from rows of the target's own answers: the first round already copies."""
    tiny_target.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    answers = truths(tiny_target, tiny_tokenizer, SETTINGS[0])
    rows = [
        {"prompt": prompt, "completion": tiny_tokenizer.decode(answer)}
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind in NAMES:
        out = tmp_path / f"{kind}.safetensors"
        said = [f"target={tmp_path / 'target'}", f"data={data}", "split=all"]
        fill_store.main([*said, f"drafter={kind}", f"out={out}"])
        taus = {}
        for name in (kind, f"{kind}:{out}"):
            drafter = load_drafter(name, tiny_target, tiny_tokenizer)
            decoder = Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=4, K=8)
            done = decoder.generate(PROMPTS, SETTINGS[0])
            assert texts(done) == answers
            taus[name] = tau(done)
        assert taus[f"{kind}:{out}"] > taus[kind], taus


def test_a_store_that_does_not_fit_is_refused(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    drafter = load_drafter("suffix", tiny_target, tiny_tokenizer)
    assert isinstance(drafter, LookupDrafter)
    mine, other = tmp_path / "mine.safetensors", tmp_path / "other.safetensors"
    drafter.save(mine, fingerprint(None, tiny_tokenizer)["tokenizer"])
    drafter.save(other, "another tokenizer")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(mine.read_bytes()[:1000])
    for name, says in (
        (f"suffix:{other}", "cut or foreign"),
        (f"stand:{mine}", "cut or foreign"),
        (f"suffix:{cut}", "cut or foreign"),
        (f"suffix:{tmp_path / 'none'}", "missing"),
    ):
        with pytest.raises(ValueError, match=f"{says}.*draftsmith remember drafter="):
            load_drafter(name, tiny_target, tiny_tokenizer)
    with pytest.raises(ValueError, match="did you mean suffix"):
        fill_store.main(["target=x", "data=y", "drafter=sufix"])


def test_an_evaluation_begins_with_an_empty_store(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    """The warm-up, and what is decoded for other reasons, leave nothing: the report's counts are
    those of a fresh decoder. Of what depends on earlier answers no alpha and no advice is told.
    """
    save_pair(tmp_path, tiny_target, tiny_draft, tiny_tokenizer)
    said = arguments(tmp_path, tmp_path / "out", "drafter=suffix", "advice=true", "K=8")
    evaluation.main([*said, "dtype=float32", "split=all"])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    fresh = load_drafter("suffix", tiny_target, tiny_tokenizer)
    decoder = Decoder(tiny_target, tiny_tokenizer, fresh, batch_size=1, K=8)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    rounds = []
    for line in (tmp_path / "prompts.jsonl").read_text().splitlines():
        ids = tiny_tokenizer(json.loads(line)["prompt"]).input_ids
        rounds.append(decoder.generate([ids], params)[0].counters.rounds)
    assert [row["rounds"] for row in report["per_prompt"]] == rounds
    assert report["identical"]["same"] == 6
    assert report["alpha"] is None and report["advice"] is None
