"""The planner against real steps: what it says a run needs, and what it refuses."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peak_memory import peak
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from draftsmith.command import guarded, parted
from draftsmith.decode.engine.memory import GIB
from draftsmith.decode.predict.machines import MACHINES
from draftsmith.models.taps import TargetStates
from draftsmith.models.tokenizer import numbered, stand_in_tokenizer
from draftsmith.train.drafts.start import fresh_draft, open_head
from draftsmith.train.objectives.distillation import Distillation, stages
from draftsmith.train.objectives.eagle import EagleObjective
from draftsmith.train.plan.fake_step import Step
from draftsmith.train.plan.memory import Held, held, rehearsed
from draftsmith.train.plan.table import (
    SPARE,
    Outline,
    PlanRequest,
    main,
    outlined,
    plan,
    remedied,
    show,
)
from draftsmith.train.run.optim import optimizers
from draftsmith.train.teachers.teachers import StateTeacher
from draftsmith.train.text.batches import Batch
from draftsmith.train.text.on_policy import Snapshot

MIB = 1 << 20
SHAPE = ("draft.heads=4", "draft.kv_heads=2", "steps=10", "heldout.prompt_tokens=4")
SHAPE += ("heldout.batch_size=1",)
# Prompts are short, so that training is what needs most.
WIDE = ("draft.layers=1", "draft.hidden=64", "draft.intermediate=128", "text.max_length=64")
WIDE += ("heldout.max_new_tokens=60", "batch_size=4")
DEEP = ("draft.layers=4", "draft.hidden=128", "draft.intermediate=344", "text.max_length=256")
DEEP += ("heldout.max_new_tokens=252", "batch_size=2")


def target_at(folder: Path, vocab: int, layers: int, **sizes: int) -> str:
    """A folder with a config.json and nothing else."""
    LlamaConfig(
        vocab_size=vocab,
        **{"hidden_size": 96, "intermediate_size": 192} | sizes,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return f"target.path={folder}"


def planned(folder: Path, vocab: int, *given: str, layers: int = 2) -> Outline:
    """The plan of a small distillation, on the CPU unless another gpu is given."""
    gpu = () if any(text.startswith("gpu=") for text in given) else ("gpu=cpu", "dtype=bfloat16")
    target = target_at(folder, vocab, layers)
    return plan(["entry=distill", "out=x", target, *SHAPE, *gpu, *given])


def two_steps(outline: Outline) -> None:
    """Two optimizer steps of the planned run, from making its models on."""
    config, vocab = outline.staged.config, outline.staged.vocab
    family = LlamaConfig.from_pretrained(config.target.path)
    target = AutoModelForCausalLM.from_config(
        family, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    target.requires_grad_(False).eval()
    draft = fresh_draft(config.draft, target, stand_in_tokenizer(), seed=0)
    snapshot = Snapshot(draft, torch.bfloat16)
    if config.gradient_checkpointing:
        draft.gradient_checkpointing_enable({"use_reentrant": False})
    teacher, loss = StateTeacher(target, vocab), stages(config.loss, config.steps)
    objective = Distillation(draft, teacher, loss, vocab_size=vocab, warp=config.warp).train()
    learners = optimizers(objective, config)
    rows, length = config.batch_size, config.text.max_length
    ids_BT = torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(rows, 1, length, length, dtype=torch.bool).tril()
    mask[:, :, length // 2 :, : length // 2] = False
    positions_BT = torch.arange(length).remainder(length // 2).expand(rows, -1)
    batch = Batch(ids_BT, positions_BT, torch.ones_like(ids_BT, dtype=torch.bool), mask, ())
    optimize(objective, learners, lambda: batch, micros=1)
    assert snapshot.take() is not draft


def optimize(
    objective: torch.nn.Module,
    learners: Sequence[torch.optim.Optimizer],
    next_batch: Callable[[], Batch],
    *,
    micros: int,
) -> None:
    """Two optimizer steps of so many micro-batches, in bf16 as a run has it."""
    for _ in range(2):
        for _ in range(micros):
            batch = next_batch()
            with torch.autocast("cpu", torch.bfloat16):
                loss = objective(batch).loss
            (loss / batch.input_ids.numel()).backward()
        for learner in learners:
            learner.step()
            learner.zero_grad()


@pytest.mark.usefixtures("rehearsed_as_asked")
@pytest.mark.parametrize(
    ("vocab", "given"),
    [(32000, WIDE), (1024, (*DEEP, "gradient_checkpointing=true"))],
    ids=["wide vocabulary", "checkpointed"],
)
def test_a_plan_is_what_two_real_steps_hold(
    tmp_path: Path, vocab: int, given: tuple[str, ...]
) -> None:
    outline = planned(tmp_path, vocab, *given)
    best = outline.best
    assert best is not None
    expected, found = best.held.total, peak(lambda: two_steps(outline))
    assert 0.8 < expected / found < 1.2, f"{expected / MIB:.1f} MiB planned, {found / MIB:.1f} held"


# What the planner prints for eagle3/qwen3-8b on a card of 24 GB, with rows of this size.
ONE_CARD = ("batch_size=1", "accumulation=4", "text.max_length=256", "cache.offload_target=true")
ONE_CARD += ("heldout.batch_size=1",)


def steps_on_kept_states(outline: Outline, target: LlamaForCausalLM) -> None:
    """Two optimizer steps of a planned EAGLE-3 run, whose states come from elsewhere."""
    config, vocab = outline.staged.config, outline.staged.vocab
    counts_V, tokenizer = torch.arange(vocab), numbered(vocab)
    head = open_head(config.head, target, tokenizer, counts_V, seed=0)
    hidden, shape = target.config.hidden_size, (1, config.text.max_length)

    def kept(batch: Batch) -> TargetStates:
        states_BTU = torch.randn(*shape, hidden * (1 + len(head.taps))).bfloat16()
        return TargetStates(states_BTU[..., :hidden], states_BTU[..., hidden:])

    objective = EagleObjective(config.unroll, head, target, tokenizer, kept).train()
    snapshot = Snapshot(head, torch.bfloat16)
    learners = optimizers(objective, config)

    def drawn() -> Batch:
        ids_BT, at_BT = torch.randint(vocab, shape), torch.arange(shape[1])[None]
        return Batch(ids_BT, at_BT, torch.ones_like(ids_BT, dtype=torch.bool), None, ())

    optimize(objective, learners, drawn, micros=config.accumulation)
    assert snapshot.take() is not head


# The smaller one has a single tile; the larger one's last tile is such a one, too.
SMALLER = pytest.param(1024, 256, marks=pytest.mark.slow)


@pytest.mark.parametrize(("vocab", "drafted"), [SMALLER, (4096, 2048)])
def test_one_card_holds_what_its_plan_says(tmp_path: Path, vocab: int, drafted: int) -> None:
    """Within 10%, with the flags that the planner gives: the target's layers are away while the
    head trains, and what stays of it (embeddings, LM head, norm) was there before. With many
    drafted tokens the losses are swept in tiles, of which the last has fewer rows.
    """
    target_at(tmp_path, vocab, layers=4)
    sizes = (f"target.path={tmp_path}", f"cache.path={tmp_path}/states")
    sizes += (f"head.draft_vocab={drafted}",)
    short = ("heldout.prompt_tokens=4", "heldout.max_new_tokens=8", "gpu=cpu")
    outline = plan(["recipe=eagle3/qwen3-8b", *sizes, *ONE_CARD, *short, "dtype=bfloat16"])
    family = LlamaConfig.from_pretrained(tmp_path)
    target = LlamaForCausalLM(family).bfloat16().eval().requires_grad_(False)
    stays = sum(p.nbytes for p in target.parameters())
    stays -= sum(p.nbytes for p in target.model.layers.parameters())
    (choice,) = outline.choices
    assert choice.held.when == "a step's passes" and choice.held.parts["losses"] > 0
    assert choice.held.target - outline.staged.spare == stays
    found = peak(lambda: steps_on_kept_states(outline, target))
    expected = choice.held.total - stays
    assert 0.9 < expected / found < 1.1, f"{expected / MIB:.1f} MiB planned, {found / MIB:.1f} held"


def test_rows_that_drop_out_take_no_room(tmp_path: Path) -> None:
    """P-EAGLE's rows of MASK, 2.2 and 7 for each position, beside as much for the pairs."""
    given = (target_at(tmp_path, 1024, layers=2), "out=x", "gpu=cpu", "text.max_length=256")
    rows = ("entry=eagle", "head.parallel=8", "K=4", "heldout.prompt_tokens=4", "steps=10")
    short = ("heldout.max_new_tokens=8", "heldout.batch_size=1", "batch_size=2")
    few, all_of_them = (
        plan([*given, *rows, *short, f"unroll={{keep: {keep}, least: 0.2}}"]).choices[0].held.parts
        for keep in (0.6, 1.0)
    )
    assert few["activations"] < 0.6 * all_of_them["activations"]


@pytest.mark.usefixtures("rehearsed_as_asked")
def test_a_frozen_weight_that_is_read_is_nothing_new(tmp_path: Path) -> None:
    """Views of weights are no new tensors: a deep target's pass holds what a flat one's does."""
    flat, deep = (planned(tmp_path, 1024, *WIDE, layers=layers) for layers in (2, 8))
    parts = [outline.choices[0].held.parts for outline in (flat, deep)]
    assert parts[0] == parts[1]


@pytest.mark.usefixtures("rehearsed_as_asked")
def test_a_step_is_broken_down(tmp_path: Path) -> None:
    held = planned(tmp_path, 32000, *WIDE).choices[0].held
    assert sum(held.parts.values()) == held.step and min(held.parts.values()) >= 0
    assert {"activations", "losses", "weights' copies", "target's pass"} <= held.parts.keys()


def test_flags_that_would_fit_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The first of the planner's offers that fits, with the run's tokens a step kept."""
    given = ["recipe=eagle3/qwen3-8b", target_at(tmp_path, 8192, layers=2), "out=x", "gpu=l40s"]
    given += ["head.draft_vocab=2048", "heldout.batch_size=1"]
    known: dict[Any, Step] = {}
    asked, recipe = parted(PlanRequest, given)
    needed = outlined(asked, recipe, 0, known=known).choices[0].held.total
    show(outlined(asked, recipe, 0.95 * needed * (1 - SPARE), known=known), Console(width=140))
    shown = capsys.readouterr().out
    assert "this does: batch_size=1 accumulation=4" in shown and shown.count("1 x l40s") == 2
    last = shown.splitlines()[-1]
    assert "draftsmith train eagle recipe=eagle3/qwen3-8b" in last and "accumulation=4" in last


def test_int8_is_offered_then_int4(tmp_path: Path) -> None:
    """Each where the one before doesn't fit; a target that int4 doesn't take is refused."""
    given = ["entry=distill", "out=x", *SHAPE, *WIDE, "batch_size=1", "gpu=l40s"]
    wide = {"hidden_size": 256, "intermediate_size": 512}
    target = target_at(tmp_path / "target", 64, layers=2, **wide)
    held, known = {}, dict[Any, Step]()
    asked, recipe = parted(PlanRequest, [*given, target])
    for kind in ("int4", "int8", ""):
        outline = outlined(asked, [*recipe, f"target.quantise={kind}"], 0, known=known)
        held[kind] = min(choice.held.total for choice in outline.choices)
        layer = 256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512
        scales = {"int4": 3 * layer // 32, "int8": 5 * (2 * 256 + 2 * 128 + 2 * 512 + 256), "": 0}
        rest = 2 * (2 * 2 * 256 + 2 * 64 * 256 + 256)
        bits = {"int4": 4, "int8": 8, "": 16}[kind]
        assert outline.sizes.target == 2 * (layer * bits // 8 + scales[kind]) + rest
    for room, offered in ((held[""], "int8"), (held["int8"], "int4")):
        outline = outlined(asked, recipe, room - 1, known=known)
        found = remedied(outline)
        assert outline.best is None and found and found[0] == [f"target.quantise={offered}"]
    odd = target_at(tmp_path / "odd", 64, layers=2, **(wide | {"intermediate_size": 500}))
    with pytest.raises(ValueError, match="got int4, 500 inputs, expected a multiple of 32; take"):
        plan([*given, odd, "target.quantise=int4"])
    with pytest.raises(ValueError, match="got 'int2', expected int8 or int4"):
        plan([*given, target, "target.quantise=int2"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["cache.offload_target=true"], "with no cache.path"),
        (["cache={path: x, offload_target: true}", "on_policy=0.5"], "on_policy.share=0.5"),
        (["target.quantise=int8", "draft.init=target"], "draft.init=target"),
    ],
)
def test_flags_that_contradict_are_refused(flags: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        planned(tmp_path, 1024, *WIDE, *flags)


@pytest.mark.usefixtures("unrehearsed")
def test_weights_and_states_are_counted_one_by_one(tmp_path: Path) -> None:
    outline = planned(tmp_path, 1024, *WIDE, "optimizer=muon")
    sizes = outline.sizes
    attention = 64 * 64 * 2 + 64 * 32 * 2
    matrices, rest = attention + 3 * 64 * 128, 1024 * 64 + 3 * 64
    assert sizes.learned == matrices + rest
    assert (sizes.weights, outline.staged.spare) == (4 * sizes.learned, 2 * sizes.learned)
    assert sizes.optimizer == 4 * matrices + 8 * rest
    layer = 96 * 96 * 2 + 96 * 48 * 2 + 3 * 96 * 192 + 2 * 96
    assert sizes.target == 2 * (2 * layer + 2 * 1024 * 96 + 96)
    # One micro-batch of 256 tokens: the layers' products forward and twice backward, the head's
    # likewise, and the target's once; attention twice forward and five times backward.
    flops = rehearsed(outline.staged, checkpointing=False, low=False).flops
    products = 2 * 256 * (3 * (matrices + 1024 * 64) + 2 * layer + 1024 * 96)
    attention = 2 * 256 * 64 * (7 * 64 + 2 * 2 * 96)
    assert flops == pytest.approx(products + attention, rel=0.005)


@pytest.mark.usefixtures("rehearsed_as_asked")
def test_each_way_divides_what_it_should(tmp_path: Path) -> None:
    outline = planned(tmp_path, 1024, *WIDE, "optimizer=adamw", "gpu=h100", "gpus=4")
    sizes, cast = outline.sizes, outline.staged
    found: dict[str, Held] = {c.way: c.held for c in outline.choices if not c.checkpointing}
    learned = sizes.learned
    assert found["ddp"].weights == 4 * learned and found["ddp"].optimizer == 8 * learned
    for name in ("zero1", "zero2", "zero3", "fsdp2"):
        assert found[name].optimizer == 2 * learned
    assert found["zero1"].weights == found["zero2"].weights == 2 * learned + learned
    assert found["fsdp2"].weights == learned and found["zero3"].weights == learned // 2 + learned
    step = rehearsed(cast, checkpointing=False, low=True)
    whole = held(cast, sizes, step, "zero1", world=4)
    assert held(cast, sizes, step, "zero2", world=4).total <= whole.total


def test_a_target_in_parts_is_counted_so(tmp_path: Path) -> None:
    """Of eight layers each of 4 ranks holds a quarter, and the two that are gathered."""
    given = ["entry=distill", "out=x", target_at(tmp_path, 1024, layers=8), *SHAPE, *WIDE]
    known: dict[Any, Step] = {}
    whole, parts = (
        outlined(PlanRequest(gpus=4), [*given, *flags], 0, known=known)
        for flags in ((), ("shard_target=true",))
    )
    layer = 2 * (96 * 96 * 2 + 96 * 48 * 2 + 3 * 96 * 192 + 2 * 96)
    for one, other in zip(whole.choices, parts.choices, strict=True):
        assert one.held.target - other.held.target == (8 - 8 // 4 - 2) * layer
        assert one.held.total - other.held.total == (8 - 8 // 4 - 2) * layer
    with pytest.raises(ValueError, match="shard_target=true and one process"):
        planned(tmp_path, 1024, *WIDE, "shard_target=true")


def test_more_rows_need_more_and_checkpointing_less(tmp_path: Path) -> None:
    few, many = (planned(tmp_path, 1024, *DEEP, f"batch_size={rows}") for rows in (1, 4))
    plain, checkpointed = many.choices
    assert many.tokens == 4 * few.tokens
    assert few.choices[0].held.step < plain.held.step > checkpointed.held.step
    assert few.choices[0].seconds < plain.seconds < checkpointed.seconds
    assert many.best is plain


def test_a_recipe_is_planned_without_its_weights(capsys: pytest.CaptureFixture[str]) -> None:
    main(["recipe=gsm8k/distill", "target.shrink=true", "gpu=l40s", "gpus=2"])
    shown = capsys.readouterr().out
    assert "step, at the fullest moment (" in shown
    # Its optimizer is muon, which DeepSpeed doesn't take.
    assert "zero" not in shown and "fsdp2" in shown
    line = "accelerate launch --config_file recipes/accelerate/gpu_ddp.yaml --num_processes 2 "
    assert line + "train/distill.py recipe=gsm8k/distill target.shrink=true" in shown


@pytest.mark.usefixtures("rehearsed_as_asked")
def test_an_acceptance_head_is_counted(tmp_path: Path) -> None:
    """Its weights among the learned ones, and its pass over all positions in the step."""
    shrunk = ("target.shrink=true", "gpu=cpu")
    alone, joint = (
        plan(["recipe=specdecpp/joint", *shrunk, f"head.weight={weight}"]) for weight in (0, 0.1)
    )
    blocks, inputs = 2 * (64 * 64 + 64), 32 + 3
    head = (inputs * 64 + 64) + blocks + (64 + 1)
    assert joint.sizes.learned == alone.sizes.learned + head
    config = joint.staged.config
    rows = config.batch_size * config.text.max_length
    assert joint.choices[0].held.step > alone.choices[0].held.step + 4 * 64 * rows


@pytest.mark.usefixtures("unrehearsed")
def test_drafts_that_learn_online_are_planned(tmp_path: Path) -> None:
    """The learner in fp32, the version that serves beside it, and no more of the target's passes
    than the requests have kept.
    """
    target = target_at(tmp_path / "target", 1024, layers=2)
    target_at(tmp_path / "drafter", 1024, layers=1)
    argv = ["recipe=online/gsm8k", target, f"drafter={tmp_path / 'drafter'}"]
    argv += ["dtype=bfloat16", "gpu=cpu"]
    outline = plan(argv)
    sizes = outline.sizes
    layer = 96 * 96 * 2 + 96 * 48 * 2 + 3 * 96 * 192 + 2 * 96
    assert sizes.learned == layer + 2 * 1024 * 96 + 96
    assert sizes.weights == outline.staged.spare == 4 * sizes.learned
    assert sizes.target == 2 * (sizes.learned + layer)
    with pytest.raises(ValueError, match="one learner"):
        plan([*argv[:-1], "gpu=h100", "gpus=2"])


@pytest.mark.usefixtures("unrehearsed")
def test_another_machines_plan_is_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this processor is slow in it, and the recipe says nothing; else as it says."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    says = {"gpu=h100": "bfloat16", "gpu=cpu": "float32", "dtype=float32": "float32"}
    for given, dtype in says.items():
        asked = (given,) if given.startswith("gpu=") else (given, "gpu=h100")
        outline = plan(["entry=distill", "out=x", target_at(tmp_path, 256, 1), *SHAPE, *asked])
        room = (1 - SPARE) * MACHINES[asked[-1].partition("=")[2]].gib * GIB
        assert (outline.staged.config.dtype, outline.room) == (dtype, room)


@pytest.mark.usefixtures("unrehearsed")
def test_scorers_are_planned_without_their_rows(tmp_path: Path) -> None:
    target_at(tmp_path, 1024, layers=1)
    outline = plan(["recipe=specdecpp/gsm8k", f"reading.drafter={tmp_path}", "gpu=cpu"])
    assert outline.sizes.target == 0 and outline.tokens == 1024
    assert outline.sizes.learned == (96 + 4) * 64 + 64 + 2 * (64 * 64 + 64) + 65


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["recipe=gsm8k/distill", "gpu=h1000"], "expected one of h100, h200"),
        (["recipe=gsm8k/distill", "gpus=0"], "gpus=0"),
        (["recipe=gsm8k/prepare"], "expected recipe=... of one that trains: distill, pretrain"),
        ([], "expected recipe=..."),
        (["recipe=gsm8k/distill", "target.path=nowhere"], "nowhere/config.json on this machine"),
        (["recipe=gsm8k/distill", "target.path=x/y", "lrr=1"], "did you mean lr?"),
    ],
)
def test_bad_input_is_told(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(main, argv) == 2
    assert says in capsys.readouterr().err
