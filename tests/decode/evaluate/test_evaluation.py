"""`evaluate` end to end on saved folders: figures against slow references, verdict, bad input."""

import copy
import json
import weakref
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from evaluated import arguments
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.command import guarded
from draftsmith.decode.__main__ import arms, main
from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.evaluate import evaluate as evaluation
from draftsmith.decode.evaluate.answers import divergences, verdict
from draftsmith.decode.evaluate.arms import (
    Evaluation,
    Loaded,
    answers,
    converse,
    load,
    warm_ups,
)
from draftsmith.decode.evaluate.teacher_forced import teacher_forced
from draftsmith.decode.forward.kv import KVPool
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.policies.timing import measured_costs, propose_call
from draftsmith.decode.prompts.prompts import Prompt, load_prompts, next_turn
from draftsmith.decode.report.schema import AnswerDifference, schema_problems
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.tree_shapes import chain_plan
from draftsmith.decode.untrained.ngram import NgramDrafter


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_evaluate_writes_reports(folders: Path, tmp_path: Path, temperature: str) -> None:
    names = f"{folders / 'draft'},{folders / 'itself'},ngram"
    asked = (f"drafter={names}", f"temperature={temperature}", "K=3", "dtype=float32")
    main(arguments(folders, tmp_path, *asked))
    reports = {
        name: json.loads((tmp_path / name / "report.json").read_text())
        for name in ("draft", "itself", "ngram")
    }
    for report in reports.values():
        assert not schema_problems(report)
        assert report["identical"] == {
            "dtype": "float32",
            "baseline": "native",
            "same": 6,
            "excused": 0,
            "total": 6,
            "worst_margin": None,
        }
        assert report["lossless"] is True
        assert report["n_prompts"] == 6
        assert 1 <= report["tau"] <= 4
        assert report["tau_interval"][0] <= report["tau"] <= report["tau_interval"][1]
    own = reports["itself"]
    assert own["alpha"] == pytest.approx(1, abs=1e-4)
    assert own["coupled_acceptance"] == pytest.approx(1, abs=0.02)
    # 15 tokens after the prefill's: three full rounds of 4, one cut to 3.
    assert own["tau"] == 15 / 4
    assert reports["ngram"]["alpha"] is None
    assert reports["draft"]["alpha"] < 0.9
    assert (reports["draft"]["rules"] is None) == (temperature == "0")
    assert (tmp_path / "draft" / "report.html").stat().st_size > 5_000
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["what"] for row in rows] == ["draft", "itself", "ngram"]
    assert [row["tau"] for row in rows] == [reports[row["what"]]["tau"] for row in rows]
    page = (tmp_path / "results.md").read_text()
    assert page.count("6 of 6") == 3
    # What one has more than another, on the same prompts.
    for pair in ("itself over draft", "ngram over draft", "ngram over itself"):
        assert f"| {temperature} | {pair} |" in page
    more = own["over"]["ngram"]
    assert more["tau"] == pytest.approx(own["tau"] - reports["ngram"]["tau"])
    assert more["speedup"] == pytest.approx(own["speedup"] - reports["ngram"]["speedup"])
    assert more["tau_interval"][0] <= more["tau"] <= more["tau_interval"][1]


def report_of(root: Path, out: Path, *more: str) -> dict[str, Any]:
    main(arguments(root, out, *more))
    report = json.loads((out / "report.json").read_text())
    assert not schema_problems(report)
    return report


def test_what_an_earlier_run_wrote_is_kept(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One report beside the newest for every run before, whatever else lies there."""
    (tmp_path / "notes.md").write_text("mine")
    found, asked = [], [f"drafter={folders / 'draft'}", "dtype=float32", "identity=false"]
    for limit in (1, 2):
        main(arguments(folders, tmp_path, *asked, f"limit={limit}", "policy=fixed"))
        found.append((tmp_path / "report.json").read_text())
    assert (tmp_path / "earlier-1" / "report.json").read_text() == found[0] != found[1]
    assert (tmp_path / "earlier-1" / "results.json").exists()
    assert not (tmp_path / "earlier-2").exists() and (tmp_path / "notes.md").exists()
    assert capsys.readouterr().out.count("an earlier run wrote") == 1


def test_k_is_the_folders_own_unless_given(folders: Path, tmp_path: Path) -> None:
    names = f"drafter={folders / 'itself'},ngram"
    main(arguments(folders, tmp_path, names, "dtype=float32", "identity=false", "policy=fixed"))
    itself, ngram = (
        json.loads((tmp_path / name / "report.json").read_text()) for name in ("itself", "ngram")
    )
    assert (itself["K"], itself["N"]) == (3.0, 4.0)
    assert ngram["acceptance_by_position"] == [0.2, 0.0, 0.0, 0.0]
    # Prompt lookup has no model; its proposal takes time all the same.
    assert ngram["times"]["draft"] > 0 and ngram["times"]["extend"] is None


@pytest.mark.parametrize("chat", [True, False])
def test_every_arm_answers_the_same_second_turn(
    folders: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, chat: bool
) -> None:
    tokenizer = copy.copy(tiny_tokenizer)
    tokenizer.chat_template = tokenizer.chat_template if chat else None
    rows = [{"turns": ["Hi", "More"], "category": "coding"}, {"turns": ["Bye"], "category": "qa"}]
    (tmp_path / "turns.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = Evaluation(
        target=str(folders / "target"),
        drafter="",
        max_new_tokens=12,
        ignore_eos=True,
        # Lossy: the arm's own first answer is another one.
        lossy="typical:1.0,1e-6",
        allow_lossy=True,
        temperature=1.0,
        dtype="float32",
    )
    pair = load(settings, {"draft": str(folders / "draft")}, "float32")
    pair.tokenizer = tokenizer
    prompts = load_prompts(str(tmp_path / "turns.jsonl"), tokenizer, limit=None)
    ticks: list[None] = []
    tick = partial(ticks.append, None)
    arms = converse(settings, pair, prompts, pair.decoders(settings), 2, tick)
    assert len(ticks) == 2 * 3, "one for each answer"
    plain, spec = (arms[name].questions for name in (None, "draft"))
    assert [len(turns) for turns in plain] == [len(turns) for turns in spec] == [2, 1]
    assert plain[0][0].tokens != spec[0][0].tokens
    assert plain[0][1].prompt_tokens == spec[0][1].prompt_tokens
    assert plain[0][1].prompt_tokens == next_turn(prompts[0], [plain[0][0].text], tokenizer)
    assert arms["draft"].tokens == [3 * 11]
    # Without room for a second turn the conversation ends; nothing else changes.
    settings.max_new_tokens = 512 - len(plain[0][1].prompt_tokens) + 1
    assert pair.fits(prompts[0].tokens, settings)
    alone = {None: pair.decoder(settings, None)}
    short = converse(settings, pair, prompts[:1], alone, 1, tick)
    assert [len(turns) for turns in short[None].questions] == [1]


@pytest.mark.parametrize(("policy", "name"), [("exits", "exits:1+2"), ("tetris:1", "itself")])
def test_what_is_chosen_by_noise_has_a_report_above_temperature_0(
    folders: Path, tmp_path: Path, policy: str, name: str
) -> None:
    """tau by other rules is left out: they allow no such choice."""
    drafter = name if policy == "exits" else str(folders / name)
    asked = f"drafter={drafter}", f"policy={policy}", "K=3", "temperature=1", "identity=false"
    report = report_of(folders, tmp_path, *asked, "limit=2")
    assert report["rules"] is None and report["policy"] == policy and report["tau"] >= 1


def test_a_row_that_failed_is_named() -> None:
    """Figures over the rows that are left would look like those of all."""

    class Broken:
        def generate(self, prompts: list, params: SamplingParams, **how: Any) -> list:
            return [Completion(0, [1]), Completion(1, [2], finish_reason="error", error="NaN")]

    with pytest.raises(ValueError, match="prompt 9: NaN"):
        answers(cast(Decoder, Broken()), {4: [1], 9: [2]}, SamplingParams(), lambda: None)


def test_two_turns_skipped_prompts_and_same_shapes_are_reported(
    folders: Path, tmp_path: Path
) -> None:
    rows = [{"turns": ["Hi", "More"], "category": "coding"}, {"turns": ["Bye"], "category": "qa"}]
    rows.append({"turns": ["long " * 400], "category": "qa"})
    path = tmp_path / "turns.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    asked = [f"drafter={folders / 'draft'}", f"prompts={path}", "baseline=same-shape", "stop=zq"]
    report = report_of(folders, tmp_path, *asked)
    assert report["skipped"] == {"prompts": 1, "of": 3, "context": 512, "turns": 0}
    assert report["n_prompts"] == 2 == len(report["per_prompt"]) == len(report["alpha_by_prompt"])
    assert report["identical"]["same"] == report["identical"]["total"] == 3
    shapes = report["identical_same_shape"]
    assert (shapes["dtype"], shapes["baseline"], shapes["total"]) == ("bfloat16", "same-shape", 3)
    assert shapes["same"] == shapes["total"]
    assert report["attention"] == "masked" and report["stop"] == ["zq"]
    assert list(report["specbench"]) == ["mt_bench", "qa", "overall"]
    assert report["specbench"]["overall"]["n_prompts"] == 2
    one = report_of(folders, tmp_path / "one", *asked[:2], "turns=1", "identity=false")
    assert sum(row["plain_tokens"] for row in one["per_prompt"]) == 2 * 16
    assert one["identical"] is None and one["identical_same_shape"] is None


def test_a_lossy_run_says_so_and_is_scored(folders: Path, tmp_path: Path) -> None:
    rows = [{"turns": [f"{i} + 1?"], "reference": [f"#### {i + 1}"]} for i in range(4)]
    path = tmp_path / "maths.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    pair = [f"drafter={folders / 'draft'}", "lossy=typical:1.0,1e-6", "allow_lossy=true"]
    asked = [*pair, "dtype=float32", "temperature=1"]
    report = report_of(folders, tmp_path, *asked, f"prompts={path}")
    assert (report["lossless"], report["lossy"]) == (False, "typical:1.0,1e-06")
    assert report["identical"] is None and report["rules"] is None
    assert (report["task"]["name"], report["task"]["n"]) == ("gsm8k", 4)
    assert report["agreement"]["share"] < 1
    assert "LOSSY" in (tmp_path / "results.md").read_text()
    unknown = report_of(folders, tmp_path / "b", *asked)
    assert unknown["task"] is None and unknown["agreement"]["share"] < 1
    lossless = report_of(folders, tmp_path / "c", *asked[:1], f"prompts={path}")
    assert lossless["task"]["difference"] == 0 and lossless["agreement"] is None


def test_trees_are_counted_by_levels_and_by_tokens(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text("[[0], [1], [2], [0, 0], [0, 1]]")
    tree = f"tree={tmp_path / 'tree.json'}"
    report = report_of(folders, tmp_path, f"drafter={folders / 'itself'}", tree, "dtype=float32")
    assert (report["K"], report["N"], report["tree"]) == (2.0, 6.0, tree[5:])
    assert report["identical"]["same"] == 6
    # 15 tokens after the prefill's in five rounds of 3: all levels kept, of 5 tokens 2.
    assert report["tau"] == 3
    assert (report["draft_acceptance_rate"], report["token_efficiency"]) == (1.0, 0.4)


def test_one_dtype_is_held_at_a_time(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bf16 pair is gone before the fp32 one is loaded."""
    loaded: list[weakref.ref] = []
    alive: list[bool] = []

    def watched(*arguments: Any) -> Loaded:
        alive.append(any(ref() is not None for ref in loaded))
        pair = load(*arguments)
        loaded.extend(map(weakref.ref, (pair.target, *pair.drafters.values())))
        return pair

    monkeypatch.setattr(evaluation, "load", watched)
    report_of(folders, tmp_path, f"drafter={folders / 'draft'}", "limit=2", "advice=true")
    assert alive == [False, False]


def test_drafters_get_names_that_tell_them_apart() -> None:
    assert arms(["a/b", "ngram"]) == {"b": "a/b", "ngram": "ngram"}
    twins = ["runs/x/drafter", "runs/y/drafter", "ngram"]
    assert list(arms(twins)) == ["x-drafter", "y-drafter", "ngram"]
    with pytest.raises(ValueError, match="each of them once"):
        arms(["ngram", "ngram"])


def test_alpha_is_the_overlap_of_the_two_laws(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    vocab = len(tiny_tokenizer)
    params = SamplingParams(temperature=0.7, max_new_tokens=10, seed=3)
    decoder = Decoder(tiny_target, tiny_tokenizer)
    done = decoder.generate(["a", "def f(x):"], params)
    got = teacher_forced(decoder.runner, LMDrafter(tiny_draft, vocab), done, params)
    for row, completion in zip(got, done, strict=True):
        total = 0.0
        for i in range(len(completion.tokens)):
            ids = torch.tensor([completion.prompt_tokens + completion.tokens[:i]])
            with torch.no_grad():
                p, q = (
                    (m(ids).logits[0, -1, :vocab].double() / 0.7).softmax(-1)
                    for m in (tiny_target, tiny_draft)
                )
            total += float(torch.minimum(p, q).sum())
        assert row.alpha == pytest.approx(total, abs=1e-3)
        assert row.positions == len(completion.tokens)


def test_a_timed_proposal_leaves_a_decoder_its_state(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    drafter = NgramDrafter()
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=2)
    prompts, params = ["abab", "def f(x):"], SamplingParams(max_new_tokens=12, ignore_eos=True)
    before = decoder.generate(prompts, params)
    propose_call(drafter, chain_plan(4), batch=3, context=8, device=torch.device("cpu"))()
    after = decoder.generate(prompts, params)
    assert [c.tokens for c in before] == [c.tokens for c in after]
    assert [c.accepted for c in before] == [c.accepted for c in after]


def test_costs_are_measured_within_the_context(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one pool a model, also where half of what is asked for is all there is."""
    made: list[tuple[int, int]] = []
    pool = Runner.pool

    def watched(self: Runner, rows: int, slots: int) -> KVPool:
        made.append((rows, slots))
        return pool(self, rows, slots)

    vocab = len(tiny_tokenizer)
    target, drafter = Runner(tiny_target, vocab), LMDrafter(tiny_draft, vocab)
    monkeypatch.setattr(Runner, "pool", watched)
    for context, slots in ((1022, 512), (100, 67)):
        made.clear()
        costs = measured_costs(target, drafter, chain_plan(15), 2, context)
        assert made == [(2, slots)] * 2 and costs.nodes == (1, 2, 4, 8, 16)
        assert min(costs.verify) > 0 and min(costs.draft) > 0


def test_the_warm_up_reaches_every_length() -> None:
    lengths = [300, 900, 40, 500, 280, 3000, 260]
    prompts = [Prompt([1] * length, "", i, "") for i, length in enumerate(lengths)]
    assert [len(tokens) for tokens in warm_ups(prompts, "cpu")] == [3000]
    # Up to 256, 512, 1024 and 4096 slots.
    assert [len(t) for t in warm_ups(prompts, "cuda:0")] == [3000, 900, 500, 260, 40]


def test_verdict_counts_and_lists() -> None:
    kind = {"dtype": "float32", "baseline": "native"}
    none = {"same": 5, "excused": 0, "total": 5, "worst_margin": None}
    assert verdict([], 5, **kind) == kind | none
    tie = AnswerDifference(prompt=2, position=7, margin=3e-5, near_tie=True, **kind)
    bug = AnswerDifference(prompt=4, position=1, margin=0.25, near_tie=False, **kind)
    two = {"same": 3, "excused": 1, "total": 5, "worst_margin": 0.25}
    assert verdict([tie, bug], 5, **kind) == kind | two
    assert [found.model_dump() for found in (tie, bug)] == [
        kind | {"prompt": 2, "position": 7, "margin": 3e-5, "near_tie": True},
        kind | {"prompt": 4, "position": 1, "margin": 0.25, "near_tie": False},
    ]


def test_the_fp64_recheck_excuses_only_a_tie(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """A target whose two best tokens are exactly equal: swapping them is excused, a third token
    not.
    """
    twin = type(tiny_target)(tiny_target.config).eval()
    twin.load_state_dict(tiny_target.state_dict())
    params = SamplingParams(max_new_tokens=3)
    context = tiny_tokenizer("def").input_ids
    with torch.no_grad():
        order = twin(torch.tensor([context])).logits[0, -1].argsort(descending=True).tolist()
        twin.lm_head.weight[order[1]] = twin.lm_head.weight[order[0]]
    want = [Completion(0, context, [min(order[:2])])]
    for other, excused in ((max(order[:2]), True), (order[2], False)):
        got = [Completion(0, context, [other])]
        found = divergences(
            want, got, twin, params, vocab_size=len(tiny_tokenizer), dtype="float32"
        )
        assert [d.near_tie for d in found] == [excused]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("target=nowhere", "nowhere"),
        ("drafter=nowhere", "nowhere"),
        ("prompts=nowhere.jsonl", "nowhere"),
        ("rule=blok", "blok"),
        ("K=0", "K: got 0"),
        ("save=true", "save: got true with advice=False"),
        ("drafter=ngram --save=true --advice=true", "a folder to save into"),
        ("temprature=1", "temperature"),
        ("temperature=-1", "temperature"),
        ("max_new_tokens=1", "max_new_tokens: got 1"),
        ("max_new_tokens=600", "exceeds the context of 512"),
        ("turns=0", "turns: got 0"),
        ("baseline=none", "baseline: got 'none', expected native, same-shape"),
        ("task=mmlu", "task: got 'mmlu', expected gsm8k"),
        ("task=gsm8k", "no prompt of"),
        ("lossy=typical", "allow_lossy=true"),
        ("tree=oak", "tree: got 'oak'"),
        ("policy=oak", "policy"),
        ("attention=oak", "attention"),
        ("min_p=0.1", "min_p: got 0.1 with temperature 0"),
    ],
)
def test_bad_input_is_one_clear_line(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture, change: str, message: str
) -> None:
    argv = arguments(folders, tmp_path, f"drafter={folders / 'draft'}", "dtype=float32")
    key = change.split("=")[0]
    argv = [a for a in argv if not a.startswith(f"{key}=")] + change.split()
    assert guarded(main, argv) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1
    assert message in printed
