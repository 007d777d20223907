"""Block drafters: no answer changes, a right one fills its path, and rounds can be captured."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from block_drafts import FORMS, GRID, LEVELS, counting, drafter, guessing, made
from eagle_drafts import VOCAB
from eagle_drafts import counting as counting_pair
from rounds import MODES, reads_nothing, records, started
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, changes_nothing, truths

from draftsmith.decode.drafters.block import BlockDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.heads.block import Block

WAYS = [replace(params, max_new_tokens=14) for params in SETTINGS]
WAYS.append(SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=14, seed=9))
IDS = ["greedy", "t1", "top-k", "top-p"]
ROUNDS: dict[str, dict[str, Any]] = MODES | {"leviathan": {"rule": "leviathan"}}
TREES: list[dict[str, Any]] = [
    {"K": LEVELS},
    {"K": 2},
    {"tree": "eagle-25", "K": LEVELS},
    {"tree": "dynamic:4,3,12"},
]


@pytest.mark.parametrize("name", FORMS)
def test_no_answer_changes(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    name: str,
) -> None:
    """Rows come and go: four prompts in three rows; and one by one, and all at once."""
    trials = zip(TREES, (3, 1, 3, 16), (WAYS, WAYS[3:], WAYS[:2], WAYS[1:2]), strict=True)
    changes_nothing((tiny_target, tiny_tokenizer), drafter(made(name), tiny_target), trials)


@pytest.mark.parametrize(
    ("name", "policy", "tree"),
    [
        *(("noise-markov", "confidence:0.05", "chain"), ("dflash", "depth:0.1", "dynamic:4,3,12")),
        *(("dflash", "confidence:0.05", "chain"), ("noise-markov", "depth:0.1", "dynamic:4,3,12")),
        pytest.param("noise-markov", "cost", "dynamic:4,3,12", marks=pytest.mark.slow),
        pytest.param("dflash", "cost", "chain", marks=pytest.mark.slow),
    ],
)
def test_no_plan_that_changes_changes_an_answer(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    name: str,
    policy: str,
    tree: str,
) -> None:
    """Shorter and longer rounds take turns: what a block left behind harms none."""
    trials = [({"policy": policy, "tree": tree}, 3, WAYS[1:2])]
    changes_nothing((tiny_target, tiny_tokenizer), drafter(made(name), tiny_target), trials)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("name", GRID)
def test_no_answer_changes_by_any_form(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    name: str,
    tree: dict[str, Any],
    batch: int,
) -> None:
    own = drafter(made(name), tiny_target)
    changes_nothing((tiny_target, tiny_tokenizer), own, [(tree, batch, WAYS)])


def kept(decoder: Decoder, params: SamplingParams) -> tuple[int, int]:
    """(rounds that kept all that was drafted, rounds that kept less), but each answer's last."""
    params = replace(params, max_new_tokens=30, ignore_eos=True)
    found = [done.counters.histogram for done in decoder.generate(PROMPTS, params)]
    short = sum(max(0, sum(histogram[:-1]) - 1) for histogram in found)
    return sum(histogram[-1] for histogram in found), short


@pytest.fixture(scope="module")
def counts() -> PreTrainedModel:
    """A target that mostly says the token after the last one, and sometimes any other."""
    target, _ = counting_pair(wrong=0.0)
    target.lm_head.weight.mul_(0.5)
    return target


@pytest.mark.parametrize("params", WAYS[::3], ids=IDS[::3])
@pytest.mark.parametrize("labels", ["shifted", "same"])
def test_a_light_head_that_knows_fills_the_best_path(
    counts: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    labels: str,
    params: SamplingParams,
) -> None:
    """Tokens, their order and the noise are right at every depth; its twin is one token off."""
    every = {"tree": "dynamic:4,3,31"}  # a smaller one may leave out the end of the best path
    for off, trees in ((0, (TREES[0], TREES[2], every)), (1, TREES[:1])):
        for tree in trees:
            own = drafter(counting(counts, labels, off), counts)
            full, short = kept(Decoder(counts, tiny_tokenizer, own, batch_size=3, **tree), params)
            right = full > 20 and short == 0 if off == 0 else full < short / 10
            assert right, (off, tree, full, short)


@pytest.mark.parametrize("params", WAYS, ids=IDS)
def test_guesses_win_the_targets_own_race(
    counts: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second row drafts what follows the first one's guess: right only where that is the token
    that the target will draw. The twin guesses without noise: as good only where there is none.
    """
    for tree in ({"K": 2}, {"tree": "dynamic:2,2,7"}):
        decoder = Decoder(counts, tiny_tokenizer, drafter(guessing(counts), counts), **tree)
        full, short = kept(decoder, params)
        assert full > 20 and short == 0, (tree, full, short)

    def blind(self: BlockDrafter, request: Any) -> Any:
        return inner(self, replace(request, race_BDV=None))

    inner = BlockDrafter._guess
    monkeypatch.setattr(BlockDrafter, "_guess", blind)
    decoder = Decoder(counts, tiny_tokenizer, drafter(guessing(counts), counts), K=2)
    full, short = kept(decoder, params)
    assert (short == 0) == (params.temperature == 0), (full, short)


@pytest.mark.parametrize("rule", ["leviathan", "block", "recursive"])
@pytest.mark.parametrize("name", ["dspark", "domino", "noise-markov"])
def test_rules_by_rejection_run(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    name: str,
    rule: str,
) -> None:
    """Greedy answers are the target's; sampled ones end."""
    tree = {"tree": "eagle-25", "K": LEVELS} if rule == "recursive" else {"K": LEVELS}
    own = drafter(made(name), tiny_target)
    decoder = Decoder(tiny_target, tiny_tokenizer, own, rule=rule, batch_size=3, **tree)
    expected = truths(tiny_target, tiny_tokenizer, WAYS[0])
    assert [c.tokens for c in decoder.generate(PROMPTS, WAYS[0])] == expected
    assert all(0 < len(c.tokens) <= 14 for c in decoder.generate(PROMPTS, WAYS[1]))


@pytest.mark.parametrize("mode", ROUNDS)
@pytest.mark.parametrize("name", ["domino", "noise-markov"])
def test_a_round_never_reads_the_device(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, name: str, mode: str
) -> None:
    """Under every rule, in place: the round can be captured."""
    own = drafter(made(name, levels=5), tiny_target)
    decoder = Decoder(tiny_target, tiny_tokenizer, own, batch_size=4, **ROUNDS[mode])
    session = started(decoder, SETTINGS[1])
    place = own.pool.kv_2LBSHE.data_ptr()
    session.hear(session.launch())
    assert place == own.pool.kv_2LBSHE.data_ptr()
    reads_nothing(decoder, session)


@pytest.mark.parametrize(
    ("name", "tree"),
    [("dspark", TREES[0]), ("domino", TREES[3]), ("treeflash", TREES[2]), ("noise", TREES[3])],
)
def test_a_recorded_round_is_the_round(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    name: str,
    tree: dict[str, Any],
) -> None:
    """Replayed on the same tensors, over two calls whose rows come and go: the same tokens."""
    own = drafter(made(name), tiny_target)
    records((tiny_target, tiny_tokenizer), own, WAYS[1], **tree)


@pytest.mark.parametrize("name", ["dspark", "dflash", "jetspec"])
def test_answers_end_at_the_heads_context(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """And what is drafted past it harms nothing before."""
    plain = Decoder(tiny_target, tiny_tokenizer).generate([[7] * 20], WAYS[0])[0].tokens
    head = made(name)
    head.config.layer.max_position_embeddings = 32
    own = drafter(Block(head.config).requires_grad_(False), tiny_target)
    decoder = Decoder(tiny_target, tiny_tokenizer, own, tree="dynamic:4,3,12")
    assert decoder.context == 32
    got = decoder.generate([[7] * 20], WAYS[0])[0]
    assert (got.tokens, got.finish_reason) == (plain[:12], "length")
    with pytest.raises(ValueError, match="expected less than the context of 32"):
        Decoder(tiny_target, tiny_tokenizer, own, K=32)


def test_more_levels_than_a_block_has_are_refused(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    for name in ("dflash", "dspark"):
        with pytest.raises(ValueError, match=f"give K={LEVELS} or less"):
            Decoder(tiny_target, tiny_tokenizer, drafter(made(name), tiny_target), K=LEVELS + 1)


def test_padded_rows_are_never_drafted(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    for name in ("dspark", "treeflash", "noise"):
        own = BlockDrafter(made(name), tiny_target, 300)
        own.reset(2, 64)
        logits = own.teacher_logits(torch.arange(20).view(2, 10), torch.randn(2, 10, 64))
        assert logits.shape == (2, 10, 300) and logits.dtype == torch.float32
        assert logits.isfinite().all() and not logits[:, 0].any()


def test_bytes_of_a_draft_call(tiny_target: PreTrainedModel) -> None:
    """The trunk and the LM head are read once a round, light heads at each level; of a table of
    embeddings a row.
    """
    lm_head = VOCAB * 32
    for name, own in {
        "dflash": 0,
        "dspark": VOCAB * 8,
        "dflash2": VOCAB * 8 + 8 * 32,
        "rnn": VOCAB * 8 + 24 * 48 + 24,
        "domino": VOCAB * 8 + 3 * 32 * (32 + 32 + 2) + 8 * (32 + 32),
    }.items():
        head = made(name)
        trunk = sum(p.numel() for n, p in head.named_parameters() if not n.startswith("light"))
        assert drafter(head, tiny_target).parameter_bytes == 4 * ((trunk + lm_head) // 4 + own)
    head = made("treeflash")  # the LM head comes after its light head
    light = sum(p.numel() for p in head.light.parameters())
    trunk = sum(p.numel() for p in head.parameters()) - light
    assert drafter(head, tiny_target).parameter_bytes == 4 * (trunk // 4 + light + lm_head)
