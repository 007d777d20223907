"""Layers of a draft side by side: the approximation, and that nothing of it stays.

Shapes as in decode/draft_lms/lm.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import made
from saved_drafts import save_draft
from tiny_llama import build_llama
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.masking_utils import create_causal_mask
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.draft_lms.easy import EasyDrafter
from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafters.load import has_folder, load_drafter
from draftsmith.decode.drafting.base import Fed, Frontier, Kept, Round
from draftsmith.decode.drafting.side_by_side import side_by_side
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.forward.runner import Runner

TREES: list[dict[str, Any]] = [
    {"K": 8},
    {"K": 3},
    {"tree": "eagle-25", "K": 3},
    {"tree": "dynamic:4,3,9"},
    {"tree": "dynamic:3,3,9", "policy": "depth:0.1"},
]


@pytest.fixture(scope="module")
def draft(tiny_tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Six layers: of groups of 3, one is whole, one isn't."""
    model = build_llama(len(tiny_tokenizer), layers=6, hidden=32, seed=5)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def folder(
    tiny_target: PreTrainedModel,
    draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    path = tmp_path_factory.mktemp("lm") / "drafter"
    return save_draft(path, draft, tiny_target, tiny_tokenizer)


@torch.no_grad()
def by_hand(model: LlamaForCausalLM, ids_BT: Tensor, size: int) -> Tensor:
    """Last states [B, T, H], by transformers' own modules."""
    body: Any = model.model
    x = body.embed_tokens(ids_BT)
    at_1T = torch.arange(ids_BT.shape[1])[None]
    rotary, mask = body.rotary_emb(x, position_ids=at_1T), None
    how = {"attention_mask": None, "past_key_values": None, "position_ids": at_1T}
    mask = create_causal_mask(config=model.config, inputs_embeds=x, **how)
    inner = body.layers[1:-1]
    groups = [[body.layers[0]], *(inner[i : i + size] for i in range(0, len(inner), size))]
    for group in [*groups, [body.layers[-1]]]:
        mixed = [
            layer.self_attn(layer.input_layernorm(x), rotary, attention_mask=mask)[0]
            for layer in group
        ]
        for layer, attended in zip(group, mixed, strict=True):
            x = x + attended
            x = x + layer.mlp(layer.post_attention_layernorm(x))
    return body.norm(x)


def test_groups_read_the_same_input(draft: LlamaForCausalLM) -> None:
    """Groups of 1 are the model to the last bit; larger ones are further off."""
    ids_BT = (torch.arange(48).view(2, 24) * 7) % 300
    runner = Runner(draft, 320)
    exact = runner.states(ids_BT)[0]
    assert torch.equal(side_by_side(runner, 1).states(ids_BT)[0], exact)
    off = []
    for size in (2, 3, 4, 9):
        states = side_by_side(runner, size).states(ids_BT)[0]
        torch.testing.assert_close(states, by_hand(draft, ids_BT, size), atol=1e-4, rtol=1e-4)
        off.append(float((states - exact).abs().mean()))
    assert 0 < off[0] < off[1] and off[2] == off[3]
    with pytest.raises(ValueError, match="expected a Llama, Qwen2, Qwen3 or Mistral"):
        side_by_side(Runner(made("phi"), 320), 2)
    for layers in (1, 2):
        whole = Runner(
            build_llama(320, layers=layers, hidden=32, seed=1).requires_grad_(False), 320
        )
        assert torch.equal(side_by_side(whole, 2).states(ids_BT)[0], whole.states(ids_BT)[0])


def test_no_answer_changes(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Rows come and go: four prompts in three rows; and one by one, and all at once."""
    own = load_drafter(f"easy:3+{folder}", tiny_target, tiny_tokenizer)
    assert own is not None and not has_folder(f"easy:3+{folder}")
    for params in SETTINGS:
        expected = truths(tiny_target, tiny_tokenizer, params)
        for tree, batch in zip(TREES, (3, 1, 16, 3, 2), strict=True):
            decoder = Decoder(tiny_target, tiny_tokenizer, own, batch_size=batch, **tree)
            assert [c.tokens for c in decoder.generate(PROMPTS, params)] == expected, tree


class Followed(EasyDrafter):
    """After each exact call, compares the keys and values of all committed tokens with those of a
    fresh pass over the text.
    """

    rounds = 0
    plain = False  # the twin: an ordinary draft's two tokens are fed, a tree's moved

    def extend(self, kept: Kept) -> None:
        super().extend(kept)
        if self.plain:
            LMDrafter.extend(self, kept)

    def _read_tail(self, lens_B1: Tensor, width: int) -> Tensor:
        read = LMDrafter._read_tail if self.plain else EasyDrafter._read_tail
        return read(self, lens_B1, width)

    def _fed(self, request: Round, frontier: Frontier, width: int) -> Fed:
        fed = super()._fed(request, frontier, width)
        for row in request.active_B.nonzero()[:, 0].tolist() if frontier.depth == 0 else ():
            length = int(request.lens_B[row])
            fresh = self.runner.pool(1, length)
            text_1N, row_1 = self.text_BS[row : row + 1, :length], torch.zeros(1).long()
            self.runner.prefill(fresh, row_1, text_1N, row_1 + length)
            now, want = (
                kv[:, :, :length]
                for kv in (self.pool.kv_2LBSHE[:, :, row], fresh.kv_2LBSHE[:, :, 0])
            )
            assert torch.allclose(now, want, atol=1e-4), (row, length)
            self.rounds += 1
        return fed


@pytest.mark.parametrize("tree", TREES[1:4], ids=["chain", "static", "dynamic"])
@pytest.mark.parametrize("plain", [False, True], ids=["ours", "uncalibrated"])
def test_nothing_approximate_stays(
    draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tree: dict[str, Any],
    plain: bool,
) -> None:
    """The target drafts for itself, so that more than one token a round is kept."""
    own = Followed(LMDrafter(draft, len(tiny_tokenizer)), 2)
    own.plain = plain
    decoder = Decoder(draft, tiny_tokenizer, own, batch_size=3, **tree)
    params = replace(SETTINGS[1], ignore_eos=True)
    if plain:
        with pytest.raises(AssertionError):
            decoder.generate(PROMPTS, params)
        return
    decoder.generate(PROMPTS, params)
    assert own.rounds > 20


def test_groups_of_one_draft_as_the_whole_does(
    draft: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """A target that drafts for itself is always right; its layers side by side are not always."""
    taus = []
    for size in (1, 4):
        own = EasyDrafter(LMDrafter(draft, len(tiny_tokenizer)), size)
        decoder = Decoder(draft, tiny_tokenizer, own, K=4, batch_size=2)
        params = replace(SETTINGS[0], ignore_eos=True, max_new_tokens=26)
        done = decoder.generate(PROMPTS, params)
        taus.append(25 * len(done) / sum(c.counters.rounds for c in done))
    assert taus[0] == 5 and taus[1] < 4.9


def test_names_that_say_nothing(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    for name, says in (
        ("easy:3", "kind None, expected easy:G\\+FOLDER"),
        (f"easy:0+{folder}", "expected easy:G\\+FOLDER, groups of 1 layer or more"),
        ("easy:3+ngram", "kind ngram, expected easy:G\\+FOLDER"),
        (f"easy:3+rapid:512+{folder}", "kind rapid, expected easy:G\\+FOLDER"),
    ):
        with pytest.raises(ValueError, match=says):
            load_drafter(name, tiny_target, tiny_tokenizer)
    own = load_drafter(f"easy:3+{folder}", tiny_target, tiny_tokenizer)
    with pytest.raises(ValueError, match="drafts 8 tokens ahead"):
        Decoder(tiny_target, tiny_tokenizer, own, K=9)
