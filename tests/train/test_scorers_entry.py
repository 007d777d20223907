"""Scorers from traces: which rows are read, what is trained, what is saved; bad input.

The traces are made up (made_up_traces.py), so that the best figures are known. All in one process.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_traces import DEPTHS, HIDDEN, PROMPTS, ROUNDS, write_trace
from saved_drafts import save_draft
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.decode.traces.store import Trace, read_traces
from draftsmith.decode.verify.lossy import load_judge
from draftsmith.models.folder.drafter_folder import open_drafter
from draftsmith.models.scorers import Scorer, ScorerConfig, load_acceptance, weights_mark
from draftsmith.train import scorers
from draftsmith.train.scoring.calibration import auc, brier
from draftsmith.train.scoring.objective import ScorerObjective, logits, weighted_entropy
from draftsmith.train.scoring.rows import (
    PARTS,
    Reading,
    RowBatches,
    ScorerRows,
    part,
    read_rows,
    state_after,
)

Argv = list[str]
JUDGE = "reading.kind=judge reading.state=token reading.scalars=[]"


@pytest.fixture
def drafter(
    tmp_path: Path,
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Path:
    return save_draft(tmp_path / "drafter", tiny_draft, tiny_target, tiny_tokenizer)


@pytest.fixture
def target(
    tmp_path: Path, tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    tiny_target.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def about(drafter: Path) -> dict[str, Any]:
    made_for = open_drafter(drafter, None).meta["target"]
    mark = {"path": str(drafter), "kind": "lm", "mark": weights_mark(drafter)}
    return {"kind": "decoder", "target": made_for, "drafter": mark}


def arguments(tmp_path: Path, drafter: Path, *more: str) -> Argv:
    given = {arg.split("=")[0] for arg in more}
    usual = [f"reading.drafter={drafter}", f"reading.traces=[{tmp_path / 'trace'}]"]
    usual += ["reading.kind=acceptance", "reading.state=parent", "reading.scalars=[lead]"]
    usual += [f"out={tmp_path / 'run'}", "target=unread"]
    usual += ["blocks=1", "width=8", "reject_weight=1", "batch_size=256", "steps=60", "lr=0.02"]
    usual += ["eval_every=20"]
    return [arg for arg in usual if arg.split("=")[0] not in given] + list(more)


def made_up_rows(count: int = 64, scalars: int = 0) -> ScorerRows:
    generator = torch.Generator().manual_seed(1)
    label_N = torch.rand(count, generator=generator)
    return ScorerRows(
        torch.randn(count, HIDDEN, generator=generator).bfloat16() * 3 + 5,
        torch.randperm(count, generator=generator),
        torch.randn(count, scalars, generator=generator) * 10 - 4,
        label_N,
        label_N > 0.5,
        torch.arange(count),
    )


def test_a_nodes_own_state_is_what_its_children_were_drawn_from() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for prompt in (7, 3):
        for round_ in range(4):
            for node in range(1, 9):
                parent = int(torch.randint(0, node, (), generator=generator))
                rows.append((prompt, round_, node, parent))
    names = ("prompt", "round", "node", "parent")
    columns = {n: torch.tensor([r[i] for r in rows]).short() for i, n in enumerate(names)}
    at_N, there_N = state_after(Trace({}, columns))
    for row, (prompt, round_, node, _) in enumerate(rows):
        children = [i for i, r in enumerate(rows) if (r[0], r[1], r[3]) == (prompt, round_, node)]
        assert bool(there_N[row]) == bool(children)
        if children:
            assert int(at_N[row]) == children[0]
    assert 0 < int(there_N.sum()) < len(rows)


def test_parts_hold_whole_prompts_and_stay_the_same(
    tmp_path: Path, about: dict[str, Any], drafter: Path
) -> None:
    shares = {name: [part(prompt) for prompt in range(4000)].count(name) for name in PARTS}
    # Binomial: three standard deviations are 76 and 57.
    assert abs(shares["fit"] - 3200) < 76 and abs(shares["check"] - 400) < 57
    folder = write_trace(tmp_path / "trace", about)
    reading = Reading(kind="acceptance", drafter=str(drafter), traces=[folder], state="parent")
    reading.scalars = ["lead", "depth"]
    parts, counts = read_rows(reading, about["target"], weights_mark(drafter))
    found = read_traces(folder).columns
    assert counts["rows"] == PROMPTS * ROUNDS * DEPTHS
    assert counts["used"] == int(found["on_path"].sum()) == sum(map(len, parts.values()))
    for name, rows in parts.items():
        assert {part(prompt) for prompt in rows.prompt_N.tolist()} == {name}
        of_part = torch.tensor([part(p) == name for p in found["prompt"].tolist()])
        chosen = of_part & found["on_path"]
        batch = rows.take(torch.arange(len(rows)))
        assert torch.equal(batch.x_XI[:, :HIDDEN], found["draft_state"][chosen].float())
        assert torch.equal(batch.x_XI[:, HIDDEN], found["lead"][chosen])
        # The decoder counts levels before the token.
        assert torch.equal(batch.x_XI[:, HIDDEN + 1], found["depth"][chosen].float() - 1)
        assert torch.equal(batch.label_X, found["kept"][chosen].float())
    reading.labels, reading.off_path = "soft", True
    soft, _ = read_rows(reading, about["target"], weights_mark(drafter))
    chance = (found["log_p"] - found["log_q"]).exp()
    assert torch.equal(
        torch.cat([rows.label_N for rows in soft.values()]).sort().values, chance.sort().values
    )
    # The state after a token, of the tokens that were read; and two traces of the same draft.
    reading.labels, reading.off_path, reading.state, reading.scalars = "hard", False, "token", []
    reading.traces = [folder, write_trace(tmp_path / "second", about)]
    twice, counts = read_rows(reading, about["target"], weights_mark(drafter))
    inner = found["on_path"] & (found["depth"] < DEPTHS)
    assert counts["used"] == 2 * int(inner.sum())
    rows = twice["check"]
    in_check = torch.tensor([part(p) == "check" for p in found["prompt"].tolist()])
    places = (inner & in_check).nonzero().flatten() + 1
    states = found["draft_state"][places].float()
    read = rows.take(torch.arange(len(rows))).x_XI
    assert torch.equal(read, torch.cat([states, states]))


def test_batches_are_a_function_of_the_step_alone_however_it_is_divided() -> None:
    rows = made_up_rows(50)
    one = RowBatches(rows, batch_size=16, seed=3)
    many = RowBatches(rows, batch_size=4, seed=3)
    seen: list[int] = []
    for step in range(7):
        whole = one.batch(step, 0, 0, accumulation=1, world=1)
        split = [
            many.batch(step, m, r, accumulation=2, world=2) for m in range(2) for r in range(2)
        ]
        assert whole.rows == tuple(row for batch in split for row in batch.rows)
        assert torch.equal(whole.x_XI, torch.cat([batch.x_XI for batch in split]))
        seen += whole.rows
    assert sorted(seen[:50]) == sorted(seen[50:100]) == list(range(50))
    assert seen[:50] != seen[50:100]
    again = RowBatches(rows, batch_size=16, seed=3).batch(5, 0, 0, accumulation=1, world=1)
    assert again.rows == tuple(seen[80:96])


def test_the_loss_is_the_papers_over_all_rows_in_value_and_gradient() -> None:
    rows = made_up_rows(scalars=2)
    config = ScorerConfig("acceptance", HIDDEN, 2, 4, ("lead", "depth"), "parent")
    torch.manual_seed(0)
    objective = ScorerObjective(Scorer(config), rows, reject_weight=6.0)
    total, count = torch.zeros(()), 0.0
    for batch in map(rows.take, torch.arange(64).split(9)):
        output = objective(batch)
        assert float(output.tokens) == objective.tokens(batch) == len(batch.rows)
        total, count = total + output.loss, count + float(output.tokens)
    got = torch.autograd.grad(total / count, list(objective.parameters()))
    # Two logits and a softmax.
    logit_N = objective.measure(rows.take(torch.arange(64)))
    pairs_N2 = torch.stack([torch.zeros_like(logit_N), logit_N], 1).log_softmax(-1)
    label_N = rows.label_N
    top = -(6 * (1 - label_N) * pairs_N2[:, 0] + label_N * pairs_N2[:, 1]).sum()
    loss = top / (6 * (1 - label_N) + label_N).sum()
    assert float(total.detach() / count) == pytest.approx(float(loss.detach()), rel=1e-6)
    for a, b in zip(got, torch.autograd.grad(loss, list(objective.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    # Balanced: as much weight on both sides.
    label_N = torch.tensor([1.0, 1.0, 1.0, 0.5])
    four = replace(rows.where(torch.arange(64) < 4), label_N=label_N)
    w = ScorerObjective(Scorer(config), four, reject_weight=0.0).reject_weight
    assert w * float((1 - label_N).sum()) == pytest.approx(float(label_N.sum()))
    assert weighted_entropy(torch.zeros(1), torch.zeros(1), w).item() == pytest.approx(
        w * math.log(2)
    )


@pytest.mark.parametrize("width", [0, 4])
def test_inputs_of_mean_0_while_it_trains_are_folded_into_the_scorer(width: int) -> None:
    """Without an entry the blocks read the state itself, and nothing is folded."""
    scalars = 2 if width else 0
    rows = made_up_rows(scalars=scalars)
    rows.scalars_NS[:, :1] = 7.0  # always the same
    names = ("lead", "depth")[:scalars]
    config = ScorerConfig("acceptance", HIDDEN, 2, width, names, "parent")
    objective = ScorerObjective(Scorer(config), rows, 1.0)
    batch = rows.take(torch.arange(64))
    x_NI = torch.cat([rows.states_RH[rows.at_N].float(), rows.scalars_NS], 1)
    assert torch.equal(batch.x_XI, x_NI)
    if width:
        torch.testing.assert_close(objective.mean_I, x_NI.mean(0))
        deviation_I = x_NI.std(0, correction=0)
        deviation_I[HIDDEN] = 1.0
        torch.testing.assert_close(objective.deviation_I, deviation_I, rtol=1e-4, atol=0)
    assert "mean_I" not in objective.state_dict()
    expected_N = objective.measure(batch).detach()
    torch.testing.assert_close(
        logits(objective.folded(torch.float32), rows), expected_N, rtol=1e-4, atol=1e-4
    )


def test_an_acceptance_head_from_trace_to_decoder(
    tmp_path: Path, about: dict[str, Any], drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It foretells about as well as the law that made the labels, calibrated in spite of w = 6; the
    drafter's own folder stays as it was.
    """
    write_trace(tmp_path / "trace", about)
    before = {file.name: file.read_bytes() for file in drafter.iterdir()}
    scorers.main(arguments(tmp_path, drafter, "reject_weight=6", "steps=90"))
    assert before == {file.name: file.read_bytes() for file in drafter.iterdir()}
    result = tmp_path / "run/drafter"
    for name, content in before.items():
        assert (result / name).read_bytes() == content
    same = [(folder / "model.safetensors").stat().st_ino for folder in (drafter, result)]
    assert same[0] == same[1], "weights are linked, not copied"
    found = load_acceptance(result, hidden=HIDDEN)
    assert found is not None and found.about["calibrated"] and found.threshold == 0.7
    assert (
        found.about["provenance"]["steps"]
        == json.loads((tmp_path / "run/done.json").read_text())["best_step"]
    )

    columns = read_traces(tmp_path / "trace").columns
    checked = torch.tensor([part(p) == "check" for p in columns["prompt"].tolist()])
    chosen = checked & columns["on_path"]
    state_NH, lead_N1 = columns["draft_state"][chosen].float(), columns["lead"][chosen][:, None]
    kept_N, truth_N = columns["kept"][chosen], columns["log_p"][chosen].add(1.0).exp()
    raw_N = found.scorer(state_NH, lead_N1)
    p_N = found.scorer.calibrated(raw_N).sigmoid()
    figures = found.about["figures"]
    assert figures["brier"] == pytest.approx(brier(p_N, kept_N), abs=1e-6)
    assert figures["auc"] == pytest.approx(auc(raw_N, kept_N), abs=1e-4)
    assert figures["rows"] == len(kept_N) > 150
    # The true law's own figures on these rows are the best there are, up to chance.
    assert figures["auc"] > auc(truth_N, kept_N) - 0.03
    assert figures["brier"] < brier(truth_N, kept_N) + 0.02 < figures["brier_constant"]
    raw = found.about["uncalibrated"]
    assert raw["ece"] > 2 * figures["ece"], "w = 6 foretells too little"
    assert raw["auc"] == pytest.approx(figures["auc"], abs=1e-6)
    middle = float((found.scorer.calibrated(raw_N) - raw_N).mean())
    assert middle == pytest.approx(math.log(6), abs=0.5)
    assert (tmp_path / "run/reliability.svg").read_text().startswith("<svg")
    assert f"drafter={result} policy=acceptance:0.7" in capsys.readouterr().out

    scorers.main(arguments(tmp_path, drafter, "reject_weight=6", "steps=90"))
    assert "nothing to do" in capsys.readouterr().out
    # Of a drafter that has one.
    scorers.main(arguments(tmp_path, result, "steps=2", f"out={tmp_path / 'next'}", "blocks=0"))
    second = load_acceptance(tmp_path / "next/drafter")
    assert second is not None and second.scorer.config.blocks == 0


def test_a_judge_is_marked_for_its_target(
    tmp_path: Path,
    about: dict[str, Any],
    target: Path,
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    def as_judge(columns: dict[str, Tensor]) -> dict[str, Tensor]:
        state_nH = columns.pop("draft_state").repeat(1, 4)
        return {"token": columns["token"], "kept": columns["kept"], "target_state": state_nH}

    write_trace(tmp_path / "trace", about | {"kind": "judge", "drafter": None}, as_judge)
    argv = [f"target={target}", f"reading={{kind: judge, traces: [{tmp_path}/trace]}}", "blocks=0"]
    argv += [f"out={tmp_path / 'run'}", "reject_weight=0", "batch_size=256", "steps=40", "lr=0.02"]
    scorers.main(argv)
    folder = str(tmp_path / "run/judge")
    judge = load_judge(folder, None, tiny_target, tiny_tokenizer)
    assert judge.scorer.out.weight.shape == (1, 32) and judge.least == 0.0
    meta = json.loads((tmp_path / "run/judge/scorer.json").read_text())
    assert meta["calibrated"] and meta["figures"]["auc"] > 0.75
    with pytest.raises(ValueError, match="for another target"):
        load_judge(folder, None, tiny_draft, tiny_tokenizer)
    tiny_draft.save_pretrained(target)
    with pytest.raises(ValueError, match=r"a trace of another target .*layers"):
        scorers.main([*argv, f"out={tmp_path / 'other'}"])


def all_kept(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    return columns | {"kept": torch.ones_like(columns["kept"])}


def broken(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    return columns | {"lead": torch.full_like(columns["lead"], torch.nan)}


def without_lead(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: column for name, column in columns.items() if name not in ("lead", "log_p")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("mark", r"a trace of another drafter \(elsewhere, of mark 123\)"),
        ("target", "a trace of another target .*tokenizer: made for .*, given other"),
        ("kind", "a trace of kind 'judge', expected decoder or mixed for reading.kind=acceptance"),
        (all_kept, r"the fit part has \d+ rows of \d+ prompts, \d+ kept and 0 rejected"),
        (broken, "rows where lead isn't a number"),
        (without_lead, "without the columns lead, log_p"),
        ("few", "the check part has 0 rows of 0 prompts"),
    ],
)
def test_traces_that_do_not_fit(
    tmp_path: Path, about: dict[str, Any], drafter: Path, change: Any, message: str
) -> None:
    swap = {
        "mark": {"drafter": {"path": "elsewhere", "mark": "123"}},
        "target": {"target": about["target"] | {"tokenizer": "other"}},
        "kind": {"kind": "judge"},
    }
    named = isinstance(change, str)
    about |= swap.get(change, {}) if named else {}
    prompts = 2 if change == "few" else 30
    write_trace(tmp_path / "trace", about, dict if named else change, prompts)
    with pytest.raises(ValueError, match=message):
        scorers.main(arguments(tmp_path, drafter, "reading.labels=soft"))


def test_traces_of_states_of_two_widths(
    tmp_path: Path, about: dict[str, Any], drafter: Path
) -> None:
    write_trace(tmp_path / "trace", about)
    wide = write_trace(
        tmp_path / "wide",
        about,
        lambda columns: columns | {"draft_state": columns["draft_state"].repeat(1, 2)},
    )
    traces = f"reading.traces=[{tmp_path / 'trace'},{wide}]"
    with pytest.raises(ValueError, match=r"states of widths .*: 8.*: 16"):
        scorers.main(arguments(tmp_path, drafter, traces))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("reading.kind=oracle", "kind='oracle'"),
        (JUDGE, "drafter: got .* for reading.kind=judge"),
        (f"{JUDGE} reading.labels=soft reading.drafter=", "and hard for a judge"),
        ("reading.labels=both", "labels: got 'both'"),
        ("reading.drafter=", "expected a drafter's folder"),
        ("reading.drafter=nowhere", "which is no folder"),
        ("reading.state=token", "expected state='parent'"),
        ("reading.scalars=[speed]", "names of"),
        ("threshold=1.0", "threshold: got 1.0, expected a number between 0 and 1"),
        ("reject_weight=-1", "reject_weight: got -1.0"),
        ("reading.traces=[]", "traces: got none"),
        ("reading.traces=[nowhere]", "nowhere: got no trace.json"),
        ("lr=1e30", "isn't finite|the loss is|aren't finite"),
    ],
)
def test_bad_input(
    tmp_path: Path, about: dict[str, Any], drafter: Path, change: str, message: str
) -> None:
    write_trace(tmp_path / "trace", about, prompts=40)
    with pytest.raises(ValueError, match=message):
        scorers.main(arguments(tmp_path, drafter, *change.split()))


def test_the_result_may_not_take_the_place_of_the_drafter_it_is_for(
    tmp_path: Path, about: dict[str, Any], drafter: Path
) -> None:
    write_trace(tmp_path / "trace", about)
    with pytest.raises(ValueError, match=r"other than the result .* another out="):
        scorers.main(arguments(tmp_path, drafter, f"out={tmp_path}", "steps=1"))
    assert open_drafter(drafter, None).kind == "lm"
