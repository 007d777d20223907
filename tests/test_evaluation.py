"""`evaluate` end to end on saved folders: figures against slow references, verdict, bad input."""

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.__main__ import arms, main
from draftsmith.decode.drafters.lm import LMDrafter
from draftsmith.decode.engine import Decoder
from draftsmith.decode.exactness import divergences, verdict
from draftsmith.decode.measure import teacher_forced
from draftsmith.decode.report import schema_problems
from draftsmith.decode.request import Completion
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.drafter_folder import save_drafter
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.provenance import provenance

MADE = provenance(recipe=None, argv=[], seeds={}, data_hash=None, steps=0)


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> Path:
    root = tmp_path_factory.mktemp("pair")
    tiny_target.save_pretrained(root / "target")
    tiny_tokenizer.save_pretrained(root / "target")
    for name, model in (("draft", tiny_draft), ("itself", tiny_target)):
        save_drafter(
            root / name,
            kind="lm",
            model=model,
            tokenizer=tiny_tokenizer,
            target_fingerprint=fingerprint(tiny_target, tiny_tokenizer),
            provenance=MADE,
            defaults={"K": 3},
        )
    rows = [{"prompt": f"def f{i}(x):", "category": "abc"[i % 3]} for i in range(6)]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def arguments(root: Path, out: Path, *more: str) -> list[str]:
    pair = [f"target={root / 'target'}", f"prompts={root / 'prompts.jsonl'}", f"out={out}"]
    return [*pair, "max_new_tokens=16", "ignore_eos=true", *more]


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_evaluate_writes_reports(folders: Path, tmp_path: Path, temperature: str) -> None:
    names = f"{folders / 'draft'},{folders / 'itself'},ngram"
    asked = (f"drafter={names}", f"temperature={temperature}", "K=3", "dtype=float32")
    assert main(arguments(folders, tmp_path, *asked)) == 0
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
    assert (tmp_path / "results.md").read_text().count("6 of 6") == 3


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


def test_verdict_counts_and_lists() -> None:
    assert verdict([], 5, dtype="float32", baseline="native")["same"] == 5


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
        ("temprature=1", "temperature"),
        ("temperature=-1", "temperature"),
    ],
)
def test_bad_input_is_one_clear_line(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture, change: str, message: str
) -> None:
    argv = arguments(folders, tmp_path, f"drafter={folders / 'draft'}", "dtype=float32")
    key = change.split("=")[0]
    argv = [a for a in argv if not a.startswith(f"{key}=")] + [change]
    assert main(argv) == 2
    printed = capsys.readouterr().out
    assert "error:" in printed
    assert message in printed
