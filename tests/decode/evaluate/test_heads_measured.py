"""What is measured and planned of heads: reports, isolated times, costs, alpha, memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import head_folders
import pytest
import torch
from eagle_drafts import VOCAB, counting, made
from evaluated import MADE, arguments
from peak_memory import GREEDY, LARGE, SAMPLED, config, model, peak
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.__main__ import main
from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafters.block import BlockDrafter
from draftsmith.decode.drafters.eagle import EagleDrafter
from draftsmith.decode.drafters.load import drafter_of
from draftsmith.decode.drafting.base import Drafter, Fed, Feed, Frontier, Round
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.evaluate.teacher_forced import teacher_forced
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.policies import timing
from draftsmith.decode.policies.timing import (
    LastDraftCall,
    clocked,
    draft_call,
    extend_call,
    isolated_times,
    measured_costs,
    with_room,
)
from draftsmith.decode.predict.best_tree import Calibration
from draftsmith.decode.predict.best_tree import run as calibrate
from draftsmith.decode.report.schema import schema_problems
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.tree_shapes import chain_plan, parse_tree
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import save_drafter
from draftsmith.models.heads.block import KINDS, Block, BlockConfig
from draftsmith.models.heads.eagle import Eagle, EagleConfig
from draftsmith.models.heads.head import Head
from draftsmith.models.heads.hydra import Hydra, HydraConfig
from draftsmith.models.heads.medusa import Medusa, MedusaConfig
from draftsmith.models.layers.layer import causal
from draftsmith.models.taps import target_states


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerBase
) -> Path:
    """A target that counts, an EAGLE-1 head that mostly knows, and a random EAGLE-3 head."""
    root = tmp_path_factory.mktemp("heads")
    target, knows = counting(wrong=0.35)
    target.save_pretrained(root / "target")
    tiny_tokenizer.save_pretrained(root / "target")
    for name, head in (("knows", knows), ("random", made("eagle3"))):
        save_drafter(
            root / name,
            kind=head.kind,
            model=head,
            tokenizer=tiny_tokenizer,
            target_fingerprint=fingerprint(target, tiny_tokenizer),
            provenance=MADE,
            defaults={"K": 3},
        )
    rows = [{"prompt": f"def f{i}(x):"} for i in range(6)]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def test_a_heads_report_is_whole(folders: Path, tmp_path: Path) -> None:
    asked = f"drafter={folders / 'knows'},{folders / 'random'}"
    argv = arguments(folders, tmp_path, asked, "temperature=1", "policy=fixed", "dtype=float32")
    argv = [word.replace("advice=false", "advice=true") for word in [*argv, "split=all"]]
    main(argv)
    found = {n: json.loads((tmp_path / n / "report.json").read_text()) for n in ("knows", "random")}
    for name, report in found.items():
        assert not schema_problems(report)
        assert report["drafter"]["kind"] == {"knows": "eagle1", "random": "eagle3"}[name]
        assert report["identical"]["same"] == report["identical"]["total"] == 6
        assert report["rules"].keys() == {"coupled", "block"}
        t, K = report["times"], report["K"]
        assert min(t.values()) > 0 and K == 3
        ideal = report["tau"] * t["plain"] / (t["verify"] + K * t["draft"] + t["extend"])
        assert report["ideal_speedup"] == pytest.approx(ideal)
        assert report["c"] == pytest.approx(t["draft"] / t["plain"])
        assert 1 < report["tau"] / report["mbsu"] < 4
        assert 0 < report["alpha"] < 1 and 0 <= report["coupled_acceptance"] < 1
        told = {(one["tree"], one["policy"]): one for one in report["advice"]["depths"]}
        assert {"medusa-63", "eagle-25", "dynamic:4,4,17"} < {tree for tree, _ in told}
        assert told["eagle-25", "fixed"]["tau"] >= told["chain", "cost"]["tau"]
    assert found["knows"]["tau"] > 2 > found["random"]["tau"]
    assert found["knows"]["alpha"] > 0.5 > found["random"]["alpha"]


def test_alpha_is_the_first_drafts_overlap(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """By the slow way: the head's own step on every beginning of the answer."""
    target, head = counting(wrong=0.35)
    drafter = EagleDrafter(head, target, VOCAB)
    params = SamplingParams(temperature=0.7, max_new_tokens=6, seed=3)
    plain = Decoder(target, tiny_tokenizer)
    done = plain.generate(["def f(x):"], params)
    got = teacher_forced(plain.runner, drafter, done, params)[0]
    text, first = done[0].prompt_tokens + done[0].tokens, len(done[0].prompt_tokens)
    total = 0.0
    for end in range(first, len(text)):
        ids_1T = torch.tensor([text[:end]])
        states = target_states(target, head.taps, input_ids=ids_1T)
        with torch.no_grad():
            p_V = target.lm_head(states.norm_BTG)[0, -1] / 0.7
            pairs = states.taps_BTF[:, :-1], ids_1T[:, 1:], torch.arange(end - 1)[None]
            q_V = head.head_DH @ head.step(*pairs, causal())[0, -1] / 0.7
        total += float(torch.minimum(p_V.softmax(-1), q_V.softmax(-1)).sum())
    assert got.positions == len(text) - first
    assert got.alpha == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("tree", ["chain", "eagle-25", "dynamic:4,3,12"])
def test_timed_calls_feed_what_rounds_feed(tiny_target: PreTrainedModel, tree: str) -> None:
    """As many steps of as many nodes; and a decoder's own state is left alone."""
    drafter, plan = EagleDrafter(made("eagle3"), tiny_target, VOCAB), parse_tree(tree, 4)
    drafter.reset(2, 64)
    own = drafter.pool
    twin = with_room(drafter, 3, 64)
    shapes: list[tuple[int, ...]] = []
    step = drafter.body.step

    class Watched:
        def __getattr__(self, name: str) -> object:
            return getattr(drafter.body, name)

        def step(self, hidden: torch.Tensor, *more: object) -> torch.Tensor:
            shapes.append(tuple(hidden.shape[:2]))
            return step(hidden, *more)  # type: ignore[arg-type]

    twin.body = Watched()  # type: ignore[attr-defined]
    at = {"batch": 3, "context": 20}
    draft_call(twin, plan.fed, **at, device=torch.device("cpu"))()
    assert shapes == [(3, nodes) for nodes in plan.fed[1:]]
    extend_call(twin, Runner(tiny_target, VOCAB), plan.levels + 1, **at)()
    assert shapes[-1] == (3, plan.levels + 1)
    assert drafter.pool is own and not own.kv_2LBSHE.any()


def test_costs_of_draft_calls(tiny_target: PreTrainedModel) -> None:
    drafter = EagleDrafter(made("eagle3"), tiny_target, VOCAB)
    costs = measured_costs(Runner(tiny_target, VOCAB), drafter, chain_plan(7), 2, 100)
    assert costs.nodes == (1, 2, 4, 8) and min(costs.verify) > 0
    assert min(costs.draft) > 0 and len(costs.draft) == len(costs.verify) == 4


def test_costs_of_a_step_between_two_sizes(
    tiny_target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over seven tokens may cost what eight do: it is timed where it is asked for, and the
    draft calls beside it lie on the line between those of four and eight nodes.
    """

    def least(calls: dict[Any, Any], *_: object) -> dict[Any, float]:
        return {n: float(n[1]) if isinstance(n, tuple) else 4.0 * (1 + n // 7) for n in calls}

    monkeypatch.setattr(timing, "least_times", least)
    drafter = EagleDrafter(made("eagle3"), tiny_target, VOCAB)
    given = Runner(tiny_target, VOCAB), drafter, chain_plan(7), 2, 100
    assert measured_costs(*given).pass_of(6) == 6.0  # (4 + 8) / 2
    costs = measured_costs(*given, passes={7, 6, 8})
    assert costs.nodes == (1, 2, 4, 6, 7, 8) and costs.verify == (4.0,) * 4 + (8.0,) * 2
    assert costs.draft == (1.0, 2.0, 4.0, 6.0, 7.0, 8.0)


@pytest.mark.parametrize("kind", ["eagle3", "hydra", "medusa"])
def test_the_last_draft_call_is_timed_alone(
    tiny_target: PreTrainedModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each round: those before it are made anew, while the clock stands."""
    drafter = drafter_of(head_folders.made(kind, tiny_target), tiny_target, VOCAB)
    drafter.reset(1, 64)
    seen: list[str] = []
    feed = drafter.feed

    def watched(request: Round) -> Feed:
        inner = feed(request)

        def fed(frontier: Frontier) -> Fed:
            seen.append(f"{frontier.depth}: {frontier.tokens_BF.shape[1]}")
            return inner(frontier)

        return fed

    drafter.feed = watched  # type: ignore[method-assign]
    call = LastDraftCall(drafter, (1, 1, 4), batch=1, context=20, device=torch.device("cpu"))
    clock = timing.time.perf_counter
    monkeypatch.setattr(timing.time, "perf_counter", lambda: (seen.append("clock"), clock())[1])
    for _ in range(2):
        clocked(call, torch.device("cpu"))
    assert seen == ["0: 1", "1: 1", "clock", "2: 4", "clock"] * 2


def test_costs_of_a_drafter_of_one_level(tiny_target: PreTrainedModel) -> None:
    """Which has no second call."""
    drafter = EagleDrafter(made("eagle3"), tiny_target, VOCAB)
    drafter.levels = 1
    fed: list[int] = []
    feed = drafter.feed

    def watched(request: Round) -> Feed:
        fed.append(request.plan.levels)
        return feed(request)

    drafter.feed = watched  # type: ignore[method-assign]
    drafter.reset(2, 128)
    costs = measured_costs(Runner(tiny_target, VOCAB), drafter, chain_plan(1), 2, 100)
    assert set(fed) == {1} and min(costs.draft) > 0


def test_a_draft_lm_takes_nothing_in_apart(
    tiny_target: PreTrainedModel, tiny_draft: PreTrainedModel
) -> None:
    where = {"batch": 1, "context": 20, "prompt": 8, "nodes": 4}
    target = Runner(tiny_target, VOCAB)
    times = isolated_times(target, LMDrafter(tiny_draft, VOCAB), chain_plan(3), **where)
    assert times["extend"] is None and times["draft"] > 0
    head = EagleDrafter(made("eagle1"), tiny_target, VOCAB)
    times = isolated_times(target, head, chain_plan(3), **where)
    assert times["extend"] > 0 and times["draft"] > 0


def test_heads_are_not_calibrated(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Decoder, "from_pretrained")  # said before anything is loaded
    with pytest.raises(ValueError, match=r"as a head's do.* use tree=eagle-25"):
        calibrate(Calibration(target=str(folders / "target"), drafter=str(folders / "knows")))


def large(kind: str, vocab: int) -> tuple[PreTrainedModel, Drafter]:
    target, about = model(vocab, 3), {"taps": (0, 1, 2), "draft_vocab": vocab // 2}
    sizes = {"hidden": 64, "rows": vocab, "heads": 5}
    heads: dict[str, Callable[[], Head]] = {
        "eagle1": lambda: Eagle(EagleConfig(config(vocab, 1), 1)),
        "eagle3": lambda: Eagle(EagleConfig(config(vocab, 1), 3, **about)),
        "medusa": lambda: Medusa(MedusaConfig(**sizes)),
        "medusa-shared": lambda: Medusa(MedusaConfig(**sizes, own_heads=False)),
        "hydra": lambda: Hydra(HydraConfig(**sizes)),
        "hydra++": lambda: Hydra(HydraConfig(**sizes, prefix=config(vocab, 1))),
        "dspark": lambda: block("dspark", vocab),
        "dflash": lambda: block("dflash", vocab),
        "domino": lambda: block("domino", vocab),
        "treeflash": lambda: block("treeflash", vocab),
        "block": lambda: block("dspark", vocab, mask="causal", noise=True),
    }
    head = heads[kind]().eval().requires_grad_(False)
    return target, drafter_of(head, target, vocab)


def block(kind: str, vocab: int, **own: Any) -> Block:
    return Block(BlockConfig(config(vocab, 1), (0, 1, 2), 5, rank=16, **KINDS[kind] | own))


HEADS = ["eagle1", "eagle3", "medusa", "medusa-shared", "hydra", "hydra++"]
HEADS += ["dspark", "dflash", "domino", "treeflash", "block"]


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    ("params", "settings", "vocab", "prompt"),
    [
        (GREEDY, {"K": 15}, LARGE, 20),
        (SAMPLED, {"K": 5, "rule": "block"}, LARGE, 20),
        (SAMPLED, {"tree": "eagle-25", "rule": "recursive"}, LARGE, 20),
        (SAMPLED, {"tree": "dynamic:4,8,16"}, LARGE, 20),
        (GREEDY, {"K": 4}, VOCAB, 600),
    ],
)
def test_a_heads_memory_is_planned(
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    params: SamplingParams,
    settings: dict,
    vocab: int,
    prompt: int,
) -> None:
    """Its pool to the byte; a run's peak within five per cent, taps included (a block's prefill is
    planned as if its context were asked about).
    """
    monkeypatch.setattr("draftsmith.decode.engine.rows.library", lambda source: None)  # as on a GPU
    monkeypatch.setattr("draftsmith.decode.engine.decoder.vocab_size", lambda tokenizer: vocab)
    target, drafter = large(kind, vocab)
    if settings.get("K", 0) > drafter.levels:
        settings = {"K": drafter.levels}
    decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=8, **settings)

    def run() -> None:
        stream = decoder.stream([[7 + row] * prompt for row in range(8)], params)
        for _ in range(8 * (2 if prompt > 100 else 3)):
            next(stream)
        stream.close()

    used, planned = peak(run), decoder.memory
    assert planned is not None
    pool = getattr(drafter, "pool", None)
    assert planned.drafter_kv == (0 if pool is None else pool.kv_2LBSHE.nbytes)
    most = 1.06 if isinstance(drafter, BlockDrafter) else 1.05
    assert 0.95 < planned.total / used < most, (planned.total, used)
