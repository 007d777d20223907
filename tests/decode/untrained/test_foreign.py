"""Drafts of another tokenizer: the same tokens, the same law, and no answer changes.

Shapes as in decode/untrained/foreign.py.
"""

import copy
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from enumeration import CPU, error, toy
from foreign_tokens import VERSE, VERSES, Watched, heart, letters, marked, other_bpe, permuted
from head_folders import made as head_made
from looked_up import tau, texts
from tiny_llama import build_llama
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafters.load import has_folder, load_drafter
from draftsmith.decode.drafting.base import Kept
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import open_request
from draftsmith.decode.forward.product import VocabHead
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import WITHOUT_REPLACEMENT, chain
from draftsmith.decode.untrained import foreign
from draftsmith.decode.untrained.foreign import ForeignDrafter, OwnText, TextwiseDrafter
from draftsmith.decode.verify.rules import RULES
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import save_drafter
from draftsmith.models.target import output_head
from draftsmith.models.vocab_map import Spelling, VocabMap, whole

TREES: list[dict[str, Any]] = [
    {"K": 4},
    {"tree": "eagle-25", "K": 3},
    {"tree": "dynamic:3,3,9"},
    {"tree": "dynamic:3,3,9", "policy": "depth:0.1"},
]
REJECTIONS: list[dict[str, Any]] = [
    {"K": 4, "rule": "leviathan"},
    {"tree": "eagle-25", "K": 3, "rule": "recursive"},
]
KINDS = {"tli": ForeignDrafter, "slem": TextwiseDrafter}


def drafter_of(kind: str, draft: str) -> ForeignDrafter:
    tokenizer, model = heart(draft)
    return KINDS[kind](model, tokenizer, heart("target")[0])


def answers(decoder: Decoder, params: SamplingParams) -> list[tuple[list[int], int]]:
    return [(c.tokens, c.counters.rounds) for c in decoder.generate(PROMPTS, params)]


@pytest.mark.parametrize("how", [*TREES[:3], *REJECTIONS], ids=str)
@pytest.mark.parametrize("params", SETTINGS[:2], ids=["greedy", "t1"])
def test_the_same_vocabulary_is_an_ordinary_draft(
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerBase,
    how: dict[str, Any],
    params: SamplingParams,
) -> None:
    """Token for token and round for round, by the same ids and by others; where rules by rejection
    look at q, too. The draft is near the target, so that more than one token a round is kept.
    """
    near = copy.deepcopy(tiny_target)
    torch.manual_seed(0)
    for parameter in near.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    own, by_other_ids = permuted(tiny_tokenizer, near)
    drafters = [
        LMDrafter(near, len(tiny_tokenizer)),
        ForeignDrafter(near, tiny_tokenizer, tiny_tokenizer),
        ForeignDrafter(by_other_ids, own, tiny_tokenizer),
    ]
    found = [
        answers(Decoder(tiny_target, tiny_tokenizer, one, batch_size=3, **how), params)
        for one in drafters
    ]
    assert found[0] == found[1] == found[2]
    assert sum(len(tokens) for tokens, _ in found[0]) > 1.1 * sum(rounds for _, rounds in found[0])


def test_its_law_is_the_draft_s_over_what_both_have(
    tiny_tokenizer: PreTrainedTokenizerBase, tiny_draft: LlamaForCausalLM
) -> None:
    """By hand, from transformers' own logits; and with the rows of the LM head in the order in
    which the map was found, and the ids in ascending order, as transformers has them, it isn't.
    """
    own, twin = permuted(tiny_tokenizer, tiny_draft)
    lost = set(range(40, 90))  # of the target's tokens, which the draft then lacks
    drafter = ForeignDrafter(twin, own, tiny_tokenizer)
    drafter.map = VocabMap(
        {t: d for t, d in drafter.map.ordinary.items() if t not in lost}, drafter.map.special
    )
    drafter._join(len(tiny_tokenizer))
    ids_BT = (torch.arange(24).view(2, 12) * 13) % 40
    z_BTV = tiny_draft(ids_BT).logits
    z_BTV[..., list(lost)] = -torch.inf
    expected_BTV = z_BTV.softmax(-1)
    with torch.inference_mode():
        assert torch.allclose(drafter.teacher_logits(ids_BT).softmax(-1), expected_BTV, atol=1e-5)
        head_DH, _ = output_head(twin)[1:]
        wrong_M = torch.tensor(list(drafter.known.values())).sort().values
        target_M = torch.tensor(sorted(drafter.known))
        drafter.runner.head = VocabHead(head_DH[wrong_M], target_M, len(tiny_tokenizer))
        q_BTV = drafter.teacher_logits(ids_BT).softmax(-1)
    assert (q_BTV - expected_BTV).abs().sum(-1).amax() > 0.5


@pytest.mark.parametrize("rule", ["leviathan", "recursive", "traversal"])
def test_a_rule_by_rejection_samples_the_target_s_law(rule: str) -> None:
    """By enumeration of all drafts of two tokens. The twin hands the rule a q whose ids are in
    another order than those that were drawn: transformers' pruned head.
    """
    target, own = letters("a", "b", "c", "d"), letters("d", "x", "b", "a", "y", "c")
    model = build_llama(6, layers=1, hidden=32, seed=4)
    drafter = ForeignDrafter(model, own, target)
    assert drafter.map.ordinary == {0: 3, 1: 2, 2: 5, 3: 0}
    law = []
    for depth in range(3):
        paths = itertools.product(range(4), repeat=depth)
        prefixes = torch.tensor([(0, *path) for path in paths])
        with torch.inference_mode():
            q_BV = drafter.teacher_logits(prefixes)[:, -1].double().softmax(-1)
        law.append(q_BV.view(*[4] * depth, 4))
    p = toy(5, 4, 3)
    topology, drawn = chain(2, CPU), WITHOUT_REPLACEMENT
    assert error(RULES[rule].verify, topology, drawn, p, law) < 1e-12
    lies = [q_V[..., [3, 1, 0, 2]] for q_V in law]
    assert error(RULES[rule].verify, topology, drawn, p, lies, drawn=law) > 0.01


class WatchedText(Watched, TextwiseDrafter):
    """The same of text."""


@pytest.mark.parametrize(
    "draft", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("bytes", "other")), "small"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_changes(kind: str, draft: str) -> None:
    """Rows come and go, end inside a draft, and outgrow what a draft with 48 positions can read;
    every first call is a fresh pass over the text.
    """
    tokenizer, target = heart("target")
    own, model = heart(draft.replace("small", "bytes"))
    watched = {"tli": Watched, "slem": WatchedText}[kind](model, own, tokenizer)
    if draft == "small":
        watched.runner.context = 48
    kept = 0.0
    for params in SETTINGS:
        plain = texts(Decoder(target, tokenizer).generate(VERSES, params))
        for tree, batch in zip(TREES[: 4 if watched.trees else 1], (3, 1, 16, 3), strict=False):
            decoder = Decoder(target, tokenizer, watched, batch_size=batch, **tree)
            done = decoder.generate(VERSES, params)
            assert texts(done) == plain, tree
            kept = max(kept, tau(done))
    assert watched.seen > 40 and (watched.halved > 3 or draft != "small")
    assert kept > (1.3 if draft != "small" else 1)


def test_rows_of_a_session_come_and_go() -> None:
    """Rounds compute some of the rows; requests sample as they like."""
    tokenizer, target = heart("target")
    plain = Decoder(target, tokenizer)
    for kind in KINDS:
        decoder = Decoder(target, tokenizer, drafter_of(kind, "other"), K=4)
        session = decoder.open_session(8, 200)
        how: dict[str, Any] = {"tokenizer": tokenizer, "context": 200, "end_ids": decoder.eos_ids}
        asked = [open_request(VERSES[i % 4], i, i, params=SETTINGS[i % 3], **how) for i in range(7)]
        for request in asked:
            session.submit(request)
            session.step()
        while session.busy:
            session.step()
        session.close()
        for i, request in enumerate(asked):
            alone = plain.generate([VERSES[i % 4]], SETTINGS[i % 3], [i])
            assert texts(alone) == [request.completion.tokens]


class Hasty(Watched):
    """Believes that what was kept of a tree is in its place."""

    def extend(self, kept: Kept) -> None:
        super().extend(kept)
        for text in self.texts:
            text.sure = len(text.ids)


def test_nodes_of_a_tree_are_not_in_their_places() -> None:
    tokenizer, target = heart("target")
    own, model = heart("other")
    decoder = Decoder(target, tokenizer, Hasty(model, own, tokenizer), tree="eagle-25", K=3)
    with pytest.raises(AssertionError):
        decoder.generate(VERSES, SETTINGS[0])


def test_an_end_is_drafted() -> None:
    """Both know where the verse ends: the end comes with tokens before it, in one round."""
    tokenizer, target = heart("target")
    params = replace(SETTINGS[0], ignore_eos=False, max_new_tokens=200)
    for kind in KINDS:
        done = Decoder(target, tokenizer, drafter_of(kind, "other"), K=8).generate(
            [VERSES[3]], params
        )[0]
        assert done.tokens[-1] == tokenizer.eos_token_id and done.accepted[-1], kind


def test_texts_are_the_same_in_both() -> None:
    """Random text of one to four bytes a character, token by token of the target; so also where a
    token ends inside a character, and after what was tokenised too long ago to change.
    """
    chosen = random.Random(5)
    target = heart("target")[0]
    for draft in ("bytes", "other"):
        for kind in KINDS:
            drafter = drafter_of(kind, draft)
            for _ in range(12):
                said = "".join(chosen.choice("ab  cé猫😀\n\u0301\ufffd") for _ in range(60))
                text, so_far, tokens = OwnText(), b"", target(said).input_ids
                for token in tokens:
                    drafter._take(text, [token])
                    so_far += drafter.target.bytes_of[token]
                    own = drafter._ids(text) if so_far else []
                    assert b"".join(drafter.own.bytes_of[i] for i in own) == so_far
                    assert len(text.rest) < foreign.LONG + 4 and len(text.before) <= foreign.NEAR
                assert so_far == said.encode()


@pytest.mark.parametrize("make", [other_bpe, marked])
def test_a_text_that_follows_another_is_spelled_as_it_goes_on(
    make: Callable[[], PreTrainedTokenizerBase],
) -> None:
    """Also by a tokenizer that puts a space before every text: alone, one would be too many."""
    spelling = Spelling(make())

    def spelled(before: bytes, after: bytes) -> bytes:
        return b"".join(spelling.bytes_of[i] for i in spelling.after(before, after))

    for cut in range(1, len(VERSE)):
        before, after = VERSE[:cut].encode()[-16:], VERSE[cut : cut + 9].encode()
        # Where no token begins, it is tokenised alone.
        assert spelled(before, after) in (after, b" " + after)
    assert spelled(b"ba", b"the") == b"the"
    assert spelled(b"", b"the") == (b" the" if make is marked else b"the")
    assert whole("猫".encode()[:2]) == 0 and whole(b"a\xff") == 2 and whole("a猫".encode()) == 4


def test_the_map_is_by_bytes_and_not_by_how_a_vocabulary_spells_them() -> None:
    """Spaces by a mark, and bytes by numbers."""
    own, target = Spelling(marked()), Spelling(heart("other")[0])
    assert own.bytes_of[own.tokenizer.get_vocab()["▁the"]] == b" the"
    assert own.bytes_of[own.tokenizer.get_vocab()["<0xE7>"]] == b"\xe7"
    found = VocabMap.of(own, target).ordinary
    assert {b" the", b"\xe7", b"\n", b" "} <= {target.bytes_of[i] for i in found}
    assert all(own.bytes_of[d] == target.bytes_of[t] for t, d in found.items())


def test_special_tokens_are_mapped_by_what_they_are_for(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """By content, else by what they begin or end; never by the letters that they are written in."""
    own, target = Spelling(other_bpe()), Spelling(tiny_tokenizer)
    found = VocabMap.of(own, target)
    assert found.special == {
        target.special[name]: own.special[name] for name in ("<|end|>", "<|pad|>", "<|assistant|>")
    }
    renamed = other_bpe()
    renamed.eos_token = "<|assistant|>"
    ends = letters("a", "</s>")
    ends.eos_token = "</s>"
    last = Spelling(renamed)
    assert VocabMap.of(last, Spelling(ends)).special == {1: renamed.eos_token_id}
    plain = Spelling(letters("<|end|>", "a"))
    assert set(VocabMap.of(plain, target).ordinary.values()) == {1}
    pairs = found.ordinary.items()
    assert all(own.bytes_of[d] == target.bytes_of[t] for t, d in pairs) and len(pairs) > 256
    assert len({d for _, d in pairs}) == len(pairs)


@pytest.mark.parametrize("how", [TREES[0], TREES[3], *REJECTIONS], ids=str)
def test_one_token_in_common_is_enough(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, how: dict[str, Any]
) -> None:
    """No NaN, at any temperature; where answers are plain decoding's, they are."""
    own = letters("e", "Ж", "Ю")
    drafter = ForeignDrafter(build_llama(3, layers=1, hidden=32, seed=2), own, tiny_tokenizer)
    assert len(drafter.known) == 1
    for params in SETTINGS:
        done = Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=3, **how).generate(
            PROMPTS, params
        )
        assert all(c.finish_reason != "error" for c in done) and tau(done) >= 1
        if params.greedy or "rule" not in how:
            assert texts(done) == truths(tiny_target, tiny_tokenizer, params)


def test_by_name(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """Folders of a plain LM with a tokenizer of its own, also after what is looked up; and what
    can't be drafted with is one sentence.
    """
    tokenizer, target = heart("target")
    own, model = heart("other")
    model.save_pretrained(tmp_path / "lm")
    own.save_pretrained(tmp_path / "lm")
    plain = texts(Decoder(target, tokenizer).generate(VERSES, SETTINGS[1]))
    for name in (f"tli:{tmp_path}/lm", f"slem:{tmp_path}/lm", f"suffix+tli:{tmp_path}/lm"):
        assert not has_folder(name)
        with pytest.warns(UserWarning, match="no draftsmith.json"):
            drafter = load_drafter(name, target, tokenizer)
        decoder = Decoder(target, tokenizer, drafter, K=4, batch_size=2)
        assert texts(decoder.generate(VERSES, SETTINGS[1])) == plain
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="tokenizers that differ"):
        load_drafter(f"{tmp_path}/lm", target, tokenizer)
    lone = build_llama(2, layers=1, hidden=32, seed=0)
    with pytest.raises(
        ValueError, match=r"0 of the target's \d+ ordinary tokens among its 2.*slem"
    ):
        ForeignDrafter(lone, letters("Ж", "Ю"), tiny_tokenizer)
    head = head_made("medusa", target)
    about: dict[str, Any] = {"provenance": {}, "defaults": {}, "tokenizer": tokenizer}
    mark = fingerprint(target, tokenizer)
    save_drafter(tmp_path / "m", kind="medusa", model=head, target_fingerprint=mark, **about)
    with pytest.raises(ValueError, match="kind medusa, expected slem:FOLDER"):
        load_drafter(f"slem:{tmp_path}/m", target, tokenizer)
    with pytest.raises(ValueError, match="no folder"):
        load_drafter("tli:nowhere", target, tokenizer)
    with pytest.raises(ValueError, match="drafts chains only"):
        Decoder(target, tokenizer, drafter_of("slem", "other"), tree="eagle-25")
    with pytest.raises(ValueError, match="draws from no distribution"):
        Decoder(target, tokenizer, drafter_of("slem", "other"), rule="leviathan").generate(
            VERSES, SETTINGS[1]
        )


def test_what_is_said_of_it() -> None:
    """It may rest; no round of its is recorded; it reads a head of the mapped tokens' rows."""
    tli, slem = drafter_of("tli", "other"), drafter_of("slem", "other")
    assert tli.follows and tli.host and slem.host and tli.parameter_bytes < slem.parameter_bytes
