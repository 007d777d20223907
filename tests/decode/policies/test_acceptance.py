"""Acceptance heads: what they compute, where they stop, what is recorded for them; bad folders."""

import warnings
from pathlib import Path

import pytest
import torch
from saved_drafts import save_draft
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.drafting.base import Call
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.policies.choice import make_policy
from draftsmith.decode.policies.policy import Acceptance, AcceptanceHead
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.tree_shapes import chain_plan
from draftsmith.models.scorers import (
    FAR,
    FOLDER,
    SCALARS,
    Scored,
    Scorer,
    ScorerConfig,
    load_acceptance,
    load_scorer,
    read_scalar,
    save_scorer,
    weights_mark,
)

HIDDEN = 32
ABOUT = {"made_for": "x", "threshold": 0.6, "calibrated": True, "figures": {}, "provenance": {}}


def scorer(seed: int = 0, **config: object) -> Scorer:
    torch.manual_seed(seed)
    config = {"hidden": HIDDEN, **config}
    made = Scorer(ScorerConfig("acceptance", **config))  # type: ignore[arg-type]
    made.scale.fill_(1.5)
    made.shift.fill_(-0.3)
    return made.eval().requires_grad_(False)


def scored(**config: object) -> Scored:
    return Scored(scorer(**config), ABOUT)


def some_call(depth: int, batch: int = 2, fed: int = 3, children: int = 4) -> Call:
    torch.manual_seed(depth)
    logits = torch.randn(batch, fed, 50)
    of_BC = torch.randint(0, fed, (batch, children))
    tokens = torch.randint(0, 50, (batch, children))
    active = torch.ones(batch, dtype=torch.bool)
    states = torch.randn(batch, fed, HIDDEN)
    above = -torch.rand(batch, fed)
    noise = torch.rand(batch, 1, 50)
    return Call(depth, active, logits, states, noise, of_BC, tokens, above_BF=above)


@pytest.mark.parametrize("state", ["parent", "none"])
def test_a_head_reads_the_state_and_numbers_of_each_child(state: str) -> None:
    hidden = HIDDEN * (state == "parent")
    made = scorer(scalars=SCALARS, state=state, width=8, hidden=hidden)
    call = some_call(depth=2)
    assert call.above_BF is not None
    found = AcceptanceHead(made, torch.device("cpu"))(call)
    for row in range(2):
        for child in range(4):
            fed, token = int(call.of_BC[row, child]), int(call.tokens_BC[row, child])
            log_q = call.q_logits_BFV[row, fed].log_softmax(-1)
            scores = call.scores_BFV[row, fed]
            others = torch.cat([scores[:token], scores[token + 1 :]])
            lead = scores[token] - others.max()
            numbers = [log_q[token], -(log_q.exp() * log_q).sum(), lead, torch.tensor(2.0)]
            before = call.of_BC[row, :child].tolist()
            rank = torch.tensor(float(before.count(fed)))
            numbers += [call.above_BF[row, fed] + log_q[token], rank]
            logit = made(call.states_BFH[row, fed, :hidden], torch.stack(numbers))
            odds = made.calibrated(logit)
            torch.testing.assert_close(found[row, child], odds.sigmoid().log())


def test_a_head_that_reads_the_token_scores_the_nodes_fed() -> None:
    made = scorer(state="token", blocks=2)
    head = AcceptanceHead(made, torch.device("cpu"))
    assert head(some_call(depth=0)).abs().max() == 0  # the root is kept already
    call = some_call(depth=1)
    own_BF = made.calibrated(made(call.states_BFH)).sigmoid().log()
    torch.testing.assert_close(head(call), own_BF.gather(1, call.of_BC))


def test_a_filter_that_leaves_one_token_breaks_no_score() -> None:
    made = scorer(scalars=SCALARS[:4], state="parent", width=8)
    logits = torch.full((1, 1, 50), -torch.inf)
    logits[..., 3] = 1.0
    tokens, of = torch.tensor([[3, 4]]), torch.zeros(1, 2, dtype=torch.int64)
    states = torch.randn(1, 1, HIDDEN)
    call = Call(1, torch.ones(1, dtype=torch.bool), logits, states, None, of, tokens)
    assert call.lead_BC.tolist() == [[torch.inf, -torch.inf]]
    found = AcceptanceHead(made, torch.device("cpu"))(call)
    numbers = torch.tensor([[0.0, 0.0, FAR, 1.0], [-FAR, 0.0, -FAR, 1.0]])
    read = made.calibrated(made(states[0].expand(2, -1), numbers))
    torch.testing.assert_close(found[0], read.sigmoid().log())
    column = torch.tensor([torch.inf, -torch.inf, 2.0])
    assert read_scalar("lead", column).tolist() == [FAR, -FAR, 2.0]
    assert read_scalar("depth", torch.tensor([1, 64])).tolist() == [0.0, 63.0]


def test_standardised_inputs_are_folded_in() -> None:
    made = scorer(state="parent", width=8)
    mean, deviation, x = torch.randn(HIDDEN), torch.rand(HIDDEN) + 0.5, torch.randn(5, HIDDEN)
    expected = made((x - mean) / deviation)
    made.standardise(mean, deviation)
    torch.testing.assert_close(made(x), expected)
    with pytest.raises(ValueError, match="give a width"):
        scorer(state="token").standardise(mean, deviation)


def test_drafting_stops_once_the_mean_chance_is_too_low() -> None:
    policy = Acceptance(chain_plan(8), 0.4, 2)
    policy.read_by(scored(state="parent"), torch.device("cpu"))
    assert policy.enough is not None

    def stops(depth: int, chances: list[float], active: list[bool]) -> list[bool]:
        call = some_call(depth, batch=len(chances), fed=1, children=1)
        call.active_B = torch.tensor(active)
        call.path_BC = torch.tensor(chances).log()[:, None]
        return list(policy.enough(call).tolist())  # type: ignore[misc]

    assert stops(1, [0.59], [True]) == [True]
    assert stops(1, [0.61], [True]) == [False]
    assert stops(0, [0.1], [True]) == [False]  # at least two draft calls
    assert stops(3, [0.9, 0.25], [True, True]) == [True, True]
    assert stops(3, [0.9, 0.35], [True, True]) == [False, False]
    assert stops(3, [0.1, 0.7], [False, True]) == [False, False]  # an idle row has no say
    nan = float("nan")
    assert stops(3, [0.1, nan], [True, False]) == [True, True]  # nor has one that is broken
    assert stops(3, [0.9, nan], [True, False]) == [False, False]
    assert stops(3, [nan], [True]) == [True]


TOKEN: dict[str, object] = {"state": "token"}
PARENT: dict[str, object] = {"state": "parent", "scalars": SCALARS, "width": 8}
NUMBERS: dict[str, object] = {**PARENT, "state": "none", "hidden": 0}


@pytest.mark.parametrize(
    ("tree", "config", "params"),
    [
        ("chain", TOKEN, SETTINGS[0]),
        ("chain", PARENT, SETTINGS[1]),
        ("eagle-25", PARENT, SETTINGS[1]),
        ("dynamic:4,3,12", TOKEN, SETTINGS[1]),
        ("dynamic:4,3,12", PARENT, SETTINGS[0]),
        ("chain", NUMBERS, SETTINGS[1]),
        ("eagle-25", NUMBERS, SETTINGS[0]),
        ("dynamic:4,3,12", NUMBERS, SETTINGS[1]),
    ],
)
def test_no_head_changes_an_answer(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tree: str,
    config: dict[str, object],
    params: SamplingParams,
) -> None:
    drafter = LMDrafter(tiny_target, len(tiny_tokenizer))
    drafter.acceptance = scored(**config)
    decoder = Decoder(
        tiny_target, tiny_tokenizer, drafter, policy="acceptance:0.2", tree=tree, batch_size=3
    )
    done = decoder.generate(PROMPTS, params)
    assert [c.tokens for c in done] == truths(tiny_target, tiny_tokenizer, params)
    rounds, drafted = (sum(getattr(c.counters, n) for c in done) for n in ("rounds", "drafted"))
    assert rounds <= drafted < decoder.settings.plan.levels * rounds  # it did stop early


@pytest.mark.parametrize("tree", ["eagle-25", "chain"])
def test_a_head_that_knows_trees_orders_and_prunes_them(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tree: str,
) -> None:
    """One that likes improbable tokens makes other trees, worse ones, and no other answers; of
    chains it learned nothing about siblings, and has no say in their order.
    """
    kept = {}
    for liking in (1.0, -1.0):
        made = scorer(state="parent", scalars=("log_q",), blocks=0)
        made.enter = torch.nn.Linear(HIDDEN + 1, HIDDEN).requires_grad_(False)
        made.enter.weight.zero_()
        made.enter.bias.zero_()
        made.enter.weight[0, -1] = liking
        made.out.weight.zero_()
        made.out.weight[0, 0] = 1.0
        drafter = LMDrafter(tiny_target, len(tiny_tokenizer))
        drafter.acceptance = Scored(made, ABOUT | {"traced": {"tree": tree}})
        decoder = Decoder(
            tiny_target,
            tiny_tokenizer,
            drafter,
            policy="acceptance:0.9999",
            tree="dynamic:3,4,6",
        )
        done = decoder.generate(PROMPTS, SETTINGS[1])
        assert [c.tokens for c in done] == truths(tiny_target, tiny_tokenizer, SETTINGS[1])
        kept[liking] = sum(c.counters.emitted for c in done) / sum(c.counters.rounds for c in done)
    assert (kept[1.0] > kept[-1.0] + 0.2) == (tree != "chain")


def test_a_head_says_when_it_learned_from_other_draws(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    drafter = LMDrafter(tiny_target, len(tiny_tokenizer))
    traced = {"rule": "coupled", "temperature": 1.0, "tree": "chain"}
    drafter.acceptance = Scored(scorer(state="parent"), ABOUT | {"traced": traced})
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, policy="acceptance")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder.generate(PROMPTS[:1], SamplingParams(temperature=1.0, max_new_tokens=3))
    with pytest.warns(UserWarning, match=r"learned from temperature 1\.0, now 0\.0"):
        decoder.generate(PROMPTS[:1], SamplingParams(max_new_tokens=3))


def test_a_policy_without_its_head_is_refused(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    drafter = LMDrafter(tiny_target, len(tiny_tokenizer))
    with pytest.raises(ValueError, match="without an acceptance head"):
        Decoder(tiny_target, tiny_tokenizer, drafter, policy="acceptance")
    for text in ("acceptance:0", "acceptance:1", "acceptance:0.5,9", "acceptance:0.5,1.5"):
        with pytest.raises(ValueError, match="policy"):
            make_policy(text, chain_plan(4))


def folder_of(tmp_path: Path, **about: object) -> Path:
    """A drafter folder of which only the weights matter, with a head."""
    drafter = tmp_path / "drafter"
    drafter.mkdir(exist_ok=True)
    (drafter / "model.safetensors").write_bytes(b"\x08" + bytes(7) + bytes(range(256)) * 80)
    save_scorer(
        drafter / FOLDER,
        scorer(state="parent"),
        ABOUT | {"made_for": weights_mark(drafter)} | about,
    )
    return drafter


def test_a_head_comes_back_from_its_folder(tmp_path: Path) -> None:
    drafter = folder_of(tmp_path)
    found = load_acceptance(drafter, HIDDEN)
    assert found is not None and found.threshold == 0.6
    x = torch.randn(3, HIDDEN)
    made = scorer(state="parent")
    torch.testing.assert_close(
        found.scorer.calibrated(found.scorer(x)), made.calibrated(made(x)), rtol=0, atol=0
    )
    assert load_acceptance(tmp_path) is None


def test_a_head_for_another_draft_is_refused(tmp_path: Path) -> None:
    drafter = folder_of(tmp_path)
    with pytest.raises(ValueError, match="states of 32, expected 48"):
        load_acceptance(drafter, 48)
    weights = drafter / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="for a draft of mark"):
        load_acceptance(drafter)


def test_a_drafter_comes_with_no_head_of_other_states(
    tmp_path: Path,
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    save_draft(tmp_path / "draft", tiny_draft, tiny_target, tiny_tokenizer)
    hidden = tiny_draft.config.hidden_size + 8
    about = ABOUT | {"made_for": weights_mark(tmp_path / "draft")}
    save_scorer(tmp_path / "draft" / FOLDER, Scorer(ScorerConfig("acceptance", hidden)), about)
    with pytest.raises(ValueError, match=f"states of {hidden}, expected {hidden - 8}"):
        load_drafter(str(tmp_path / "draft"), tiny_target, tiny_tokenizer)


def test_broken_folders_and_settings_are_refused(tmp_path: Path) -> None:
    head = folder_of(tmp_path) / FOLDER
    with pytest.raises(ValueError, match="expected schema 1 and kind 'judge'"):
        load_scorer(head, "judge")
    with pytest.raises(ValueError, match=r"threshold: got 1\.0, expected"):
        folder_of(tmp_path, threshold=1.0)
    (head / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes()[:90])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load_scorer(head, "acceptance")
    (head / "scorer.json").unlink()
    with pytest.raises(ValueError, match=r"without scorer\.json"):
        load_scorer(head, "acceptance")
    wrong: list[tuple[dict[str, object], str]] = [
        ({"state": "token", "scalars": ("log_q",)}, "expected state='parent'"),
        ({"scalars": ("log_q", "log_q"), "state": "parent"}, "each once"),
        ({"blocks": -1}, "expected at least 1, 0 and 0"),
    ]
    for config, message in wrong:
        with pytest.raises(ValueError, match=message):
            scorer(**config)
    with pytest.raises(ValueError, match="a judge with state='parent'"):
        ScorerConfig("judge", HIDDEN, state="parent")


def test_an_uncalibrated_head_says_how_good_it_is(tmp_path: Path) -> None:
    drafter = folder_of(
        tmp_path, calibrated=False, figures={"brier": 0.2345, "brier_constant": 0.2}
    )
    with pytest.warns(UserWarning, match=r"Brier score 0\.2345, that of a constant 0\.2000"):
        load_acceptance(drafter)
