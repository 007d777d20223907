"""SWIFT and the offline search: what they choose, what a trial counts, and that nothing changes."""

import json
import random
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from families import KINDS, SIZES, made
from tiny_llama import build_llama
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.drafters.load import has_folder, load_drafter
from draftsmith.decode.drafting.base import Race, Round
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.graphs import Graphs
from draftsmith.decode.engine.request import open_request
from draftsmith.decode.engine.round import Run
from draftsmith.decode.forward.attention import Seen
from draftsmith.decode.predict.best_layers import best_sets, main
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.untrained.own_layers import joined, part_bytes, worth
from draftsmith.decode.untrained.swift import LEAST, WINDOW, SwiftDrafter

WAYS = [replace(params, max_new_tokens=24) for params in SETTINGS]
TREES: list[dict[str, Any]] = [
    {"K": 3},
    {"tree": "eagle-25", "K": 3},
    {"tree": "dynamic:3,3,9"},
    {"tree": "dynamic:3,3,9", "policy": "depth:0.1"},
]
LONG = replace(SETTINGS[0], max_new_tokens=200, ignore_eos=True)
LONG_SPIED = replace(SETTINGS[0], max_new_tokens=70, ignore_eos=True)
SAMPLED = replace(SETTINGS[1], max_new_tokens=200, ignore_eos=True)


class Watched(SwiftDrafter):
    """Notes every trial and every set; `eager` tries before each round."""

    eager = False

    def watch(self) -> "Watched":
        self.trials: list[tuple[list[int], bool]] = []
        self.sets = [self.without]
        self.clean = True
        return self

    def between(self, request: Round, race: Race) -> bool:
        if self.eager:
            self.wait = 1
        before, pool, chosen = self.pool.kv_2LBSHE.clone(), self.pool, self.chosen
        won = super().between(request, race)
        for row, length in enumerate(request.lens_B.tolist()):
            now = pool.kv_2LBSHE[:, :, row, :length]
            self.clean = self.clean and bool((now == before[:, :, row, :length]).all())
        assert won == (self.chosen != chosen)
        if won:
            self.sets.append(self.without)
        return won


@pytest.fixture(scope="module")
def deep(tiny_tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Six layers; layer 3 adds nothing to what goes through it."""
    model = build_llama(len(tiny_tokenizer), layers=6, hidden=32, seed=3)
    with torch.no_grad():
        model.model.layers[3].self_attn.o_proj.weight.zero_()
        model.model.layers[3].mlp.down_proj.weight.zero_()
    return model.requires_grad_(False)


def swift(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, share: float) -> Watched:
    return Watched(target, len(tokenizer), share).watch()


@pytest.mark.parametrize("params", [LONG, SAMPLED], ids=["greedy", "t1"])
def test_it_drops_the_layer_that_does_nothing(
    deep: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, params: SamplingParams
) -> None:
    """2 of 8 halves: of a random target anything else changes most choices."""
    own = swift(deep, tiny_tokenizer, 0.25)
    assert own.without != {(3, "attention"), (3, "mlp")}
    decoder = Decoder(deep, tiny_tokenizer, own, K=3, batch_size=4)
    decoder.generate(PROMPTS, params)
    decoder.generate(PROMPTS, params)
    assert own.without == {(3, "attention"), (3, "mlp")} and own.form == "3"
    assert len(own.sets) > 1 and all(len(found) == 2 for found in own.sets)
    (done, *_) = decoder.generate(PROMPTS, params)
    assert done.counters.histogram[3] > 0.9 * done.counters.rounds


def test_an_easy_prompt_does_not_lock_the_set(
    deep: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Of a target that says one token for ever, every set scores 1: the best score there is."""
    own = swift(deep, tiny_tokenizer, 0.25)
    decoder = Decoder(deep, tiny_tokenizer, own, K=3, batch_size=4)
    with torch.no_grad():
        head = deep.get_output_embeddings().weight.detach().clone()
        deep.get_output_embeddings().weight.zero_()
    try:
        decoder.generate(PROMPTS, LONG)
    finally:
        with torch.no_grad():
            deep.get_output_embeddings().weight.copy_(head)
    assert own.without != {(3, "attention"), (3, "mlp")}
    decoder.generate(PROMPTS, LONG)
    decoder.generate(PROMPTS, LONG)
    assert own.without == {(3, "attention"), (3, "mlp")}


@pytest.fixture(scope="module")
def answers(deep: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    return [truths(deep, tiny_tokenizer, params) for params in WAYS]


def test_no_answer_changes(
    deep: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    answers: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trials before every round; rows come and go, and sets change under their drafts."""
    monkeypatch.setattr("draftsmith.decode.untrained.swift.LEAST", 4)
    own = swift(deep, tiny_tokenizer, 0.5)
    own.eager = True
    for i, (tree, batch) in enumerate(zip(TREES, (3, 1, 16, 3), strict=True)):
        decoder = Decoder(deep, tiny_tokenizer, own, batch_size=batch, **tree)
        for way in (i % 3, (i + 1) % 3):
            got = [c.tokens for c in decoder.generate(PROMPTS, WAYS[way])]
            assert got == answers[way], (tree, way)
        assert decoder._batch is not None and decoder.memory is not None
        slots = max(map(len, map(tiny_tokenizer.encode, PROMPTS))) + 24 + 1 + WINDOW
        assert decoder._batch.pool.slots == decoder.memory.work.slots >= slots
    assert own.clean and len(own.sets) > 5
    assert all(len(found) == 4 for found in own.sets)
    assert not any({0, 5} & {layer for layer, _ in found} for found in own.sets)


class Spy(Watched):
    """Checks at each trial what the target's own layers match, all of it, and that a challenger's
    states are those on a clone of the committed slots; `harm` writes among them.
    """

    harm = False
    checked = short = 0

    def between(self, request: Round, race: Race) -> bool:
        first_B = self.first_B.clone()
        self.first_B.copy_(self.answer_B)
        counts_BM, whole_BM = self.matches(request, race, self.whole)
        total = int(counts_BM.sum())
        assert torch.equal(counts_BM, whole_BM)
        assert total == sum(
            min(int(n - first) + 1, WINDOW)
            for n, first, active in zip(
                request.lens_B, self.answer_B, request.active_B, strict=False
            )
            if active
        )
        self.checked += total > 0
        if self.harm:
            self.pool.kv_2LBSHE[:, :, 0, 2] += 1.0
        part = self.whole.part(self.last, joined(self.challenger))
        verify, got = part.verify, []

        def told(*args: Any) -> Any:
            got.append(verify(*args))
            return got[-1]

        part.verify = told  # type: ignore[method-assign]
        self.matches(request, race, part)
        self.first_B.copy_(first_B)
        if self.checked % 5 == 1:
            self.compare(request, verify, got[0][0])
        return super().between(request, race)

    def compare(self, request: Round, verify: Any, states_BMH: Tensor) -> None:
        for row, n in enumerate(request.lens_B.tolist()):
            if not request.active_B[row]:
                continue  # it may be longer than what is looked at
            begin = max(0, n - WINDOW)
            clone = self.whole.pool(1, self.pool.slots)
            clone.kv_2LBSHE.copy_(self.pool.kv_2LBSHE[:, :, row : row + 1])
            at_1M = torch.arange(begin, n)[None]
            lens_1 = torch.tensor([begin])
            seen = Seen(lens_1, clone.slots)
            text_1M = self.text_BS[row : row + 1, begin:n]
            expected, _ = verify(clone, text_1M, at_1M, at_1M, seen)
            torch.testing.assert_close(states_BMH[row, : n - begin], expected[0])
            self.short += n < WINDOW


@pytest.mark.parametrize("attention", ["masked", "split"])
@pytest.mark.parametrize("params", [WAYS[0], WAYS[2]], ids=["greedy", "filtered"])
def test_what_a_trial_counts(
    deep: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    attention: str,
    params: SamplingParams,
) -> None:
    own = Spy(deep, len(tiny_tokenizer), 0.5).watch()
    decoder = Decoder(deep, tiny_tokenizer, own, K=3, batch_size=3, attention=attention)
    decoder.generate(PROMPTS, replace(params, max_new_tokens=70, ignore_eos=True))
    assert own.checked > 20 and own.short and own.clean


def test_whole_layers_and_windows(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """A body that is transformers' own, most layers of which see eight positions."""
    kinds = [*KINDS, *KINDS[:2]]
    sizes = SIZES | {"num_hidden_layers": 5, "layer_types": kinds, "sliding_window": 8}
    torch.manual_seed(0)
    target = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, head_dim=8)).eval().requires_grad_(False)
    own = Spy(target, 320, 0.5).watch()
    decoder = Decoder(target, tiny_tokenizer, own, K=3, batch_size=2)
    decoder.generate(PROMPTS, LONG_SPIED)
    assert own.checked > 20 and own.clean
    assert all(len(found) == 2 and len({i for i, _ in found}) == 1 for found in own.sets)


def test_of_three_whole_layers_one_can_go(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    own = SwiftDrafter(made("gemma3"), 320, 0.5)
    assert own.scratch == 0 and own.form == "1"


def test_a_trial_that_writes_to_committed_slots_is_told_apart(
    deep: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    own = Spy(deep, len(tiny_tokenizer), 0.5).watch()
    own.harm = True
    decoder = Decoder(deep, tiny_tokenizer, own, K=3)
    with pytest.raises(AssertionError):
        decoder.generate(PROMPTS[:1], LONG_SPIED)


def test_who_wins_is_better_on_what_decided(
    deep: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    told = []

    class Kept(Watched):
        def adopt(self, chosen: Any) -> None:
            if hasattr(self, "found"):
                told.append((*self.found, self.without, joined(chosen)))
            super().adopt(chosen)

    own = Kept(deep, len(tiny_tokenizer), 0.5).watch()
    Decoder(deep, tiny_tokenizer, own, K=3, batch_size=4).generate(PROMPTS, SAMPLED)
    assert len(told) >= 2
    for counted, now, new, differ, *sets in told:
        costs = [part_bytes(deep, 6, halves) / part_bytes(deep, 6, ()) for halves in sets]
        shares = now / counted, (new - differ**0.5) / counted
        held, sure = (worth(a, 3, c) for a, c in zip(shares, costs, strict=True))
        assert counted >= LEAST and sure > held


@pytest.mark.parametrize("rule", ["leviathan", "recursive"])
def test_rules_by_rejection(
    deep: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, rule: str
) -> None:
    own = swift(deep, tiny_tokenizer, 0.25)
    decoder = Decoder(deep, tiny_tokenizer, own, K=3, rule=rule, batch_size=4)
    decoder.generate(PROMPTS, SAMPLED)
    assert own.clean and len(own.sets) > 1


def test_another_set_is_another_recording(
    deep: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """A recording drafts by the halves that drafted when it was made."""
    own = swift(deep, tiny_tokenizer, 0.25)
    decoder = Decoder(deep, tiny_tokenizer, own, K=3, batch_size=4)
    stale = []

    def record(run: Run) -> Run:
        form = own.form

        def replay() -> Any:
            stale.append(own.form != form)
            return run()

        return replay

    decoder.graphs = Graphs(decoder.stepper, record)
    got = decoder.generate(PROMPTS, LONG)
    assert len(own.sets) > 1 and len(stale) > 20 and not any(stale)
    plain = Decoder(deep, tiny_tokenizer, batch_size=4).generate(PROMPTS, LONG)
    assert [one.tokens for one in got] == [one.tokens for one in plain]


def test_narrow_rounds_draft_by_the_last_set(
    deep: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    own = swift(deep, tiny_tokenizer, 0.25)
    decoder = Decoder(deep, tiny_tokenizer, own, K=3)
    session = decoder.open_session(4, 400)
    request = open_request(PROMPTS[0], 0, 0, tokenizer=tiny_tokenizer, params=LONG, context=400)
    session.submit(request)
    while session.busy:
        session.step()
        forms = {getattr(part.drafter, "form", "") for part in session._parts.values()}
        assert forms <= {own.form}
    assert len(own.sets) > 1 and own.clean
    session.close()
    (plain,) = Decoder(deep, tiny_tokenizer).generate(PROMPTS[:1], LONG)
    assert request.completion.tokens == plain.tokens


@pytest.mark.parametrize("says", ["0", "1", "x", "-0.5", "."])
def test_shares_that_say_nothing(
    deep: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, says: str
) -> None:
    with pytest.raises(ValueError, match="expected swift:SHARE"):
        load_drafter(f"swift:{says}", deep, tiny_tokenizer)


def test_names(deep: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    assert not has_folder("swift") and not has_folder("swift:0.3")
    own = load_drafter("swift", deep, tiny_tokenizer)
    assert isinstance(own, SwiftDrafter) and len(own.without) == int(8 * 0.45)
    shallow = build_llama(len(tiny_tokenizer), layers=2, hidden=32, seed=0).requires_grad_(False)
    with pytest.raises(ValueError, match="got a target of 2 layers, expected at least 3"):
        load_drafter("swift", shallow, tiny_tokenizer)


def test_search_finds_the_best_sets() -> None:
    """Values with interactions: of few sets all are tried, of many nearly the best are found."""
    units = [frozenset({(i, half)}) for i in range(5) for half in ("attention", "mlp")]
    for seed in range(5):
        rng, asked = random.Random(seed), []
        weight = {unit: rng.random() for unit in units}
        clash = {frozenset(pair): rng.random() for pair in combinations(units, 2)}

        def value(chosen: Any, weight: Any = weight, clash: Any = clash, asked: Any = asked) -> Any:
            asked.append(chosen)
            both = sum(clash[frozenset(pair)] for pair in combinations(chosen, 2))
            return -sum(weight[unit] for unit in chosen) - both

        best = {k: max(map(value, map(frozenset, combinations(units, k)))) for k in range(1, 6)}
        asked.clear()
        for swaps, slack in ((10**6, 0.0), (40, 0.3), (0, 2.5)):
            found = list(best_sets(value, units, 5, swaps, random.Random(seed)))
            assert [len(chosen) for chosen in found] == [1, 2, 3, 4, 5]
            assert all(value(chosen) >= best[len(chosen)] - slack for chosen in found)
            assert found == list(best_sets(value, units, 5, swaps, random.Random(seed)))


def test_skip_layers(
    deep: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It drops the layer that does nothing, goes on where it was stopped, and refuses others'."""
    deep.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "p.jsonl").write_text(
        "".join(f'{{"prompt": "{p}"}}\n' for p in ("a b", "def", "x"))
    )
    where = f"target={tmp_path}/target prompts={tmp_path}/p.jsonl out={tmp_path}/out"
    how = f"{where} swaps=2 share=0.3 finalists=1 dtype=float32 max_new_tokens=24 temperature=1"
    main(how.split())
    assert "drafter=skip:3 K=4" in capsys.readouterr().out
    (tried,) = (tmp_path / "out").glob("tried-*.jsonl")
    lines = tried.read_bytes().splitlines(keepends=True)
    names = [json.loads(line)["drafter"] for line in lines]
    assert len(names) == len(set(names)) > 20
    tried.write_bytes(b"".join(lines[:-3]) + lines[-3][:9])
    main(how.split())
    assert tried.read_bytes().splitlines(keepends=True) == lines
    saved = json.loads((tmp_path / "out" / "best.json").read_text())
    assert saved["best"]["drafter"] == "skip:3" and saved["best"]["agreement"] == 1
    assert saved["best"]["tau"] > 4 and len(saved["sets"]) == 3
    main([*how.split(), "seed=1"])  # other answers: nothing that was taken on these is believed
    assert len(list((tmp_path / "out").glob("tried-*.jsonl"))) == 2
    with pytest.raises(ValueError, match="share: got 1, expected"):
        main([*how.split(), "share=1"])
