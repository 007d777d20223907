"""A draft LM that drafts a round in one pass: no answer changes, it says what lone MASKs say behind
each row's own text, and nothing of them stays.

Shapes as in decode/draft_lms/pard.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rounds import MODES, reads_nothing, records, started
from saved_drafts import save_draft
from tiny_llama import build_llama
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from truths import LONGER, PROMPTS, SETTINGS, truths

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.draft_lms.pard import PardDrafter, lm_drafter
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.drafting.base import Drafter, Fed, Kept, Round
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.traces.record import check_mixing

MASK, LEVELS = 5, 6
HOW: list[dict[str, Any]] = [
    {"K": LEVELS},
    {"K": 2},
    {"tree": "eagle-25", "K": 3},
    {"tree": "dynamic:4,3,9"},
    {"tree": "dynamic:3,3,9", "policy": "depth:0.1"},
    {"K": 3, "rule": "leviathan"},
]


def model(vocab: int) -> LlamaForCausalLM:
    made = build_llama(vocab, layers=2, hidden=32, seed=5).requires_grad_(False)
    made.config.pard_token, made.config.para_num = MASK, LEVELS
    return made


@pytest.fixture(scope="module")
def draft(tiny_tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    return model(len(tiny_tokenizer))


def test_no_answer_changes(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, draft: PreTrainedModel
) -> None:
    """Rows come and go: four prompts in three rows; and one by one, and all at once."""
    own = lm_drafter(draft, len(tiny_tokenizer))
    assert isinstance(own, PardDrafter) and own.levels == LEVELS
    for params in SETTINGS[:2]:
        expected = truths(tiny_target, tiny_tokenizer, params)
        for how, batch in zip(HOW, (3, 1, 16, 3, 2, 3), strict=True):
            decoder = Decoder(tiny_target, tiny_tokenizer, own, batch_size=batch, **how)
            found = [c.tokens for c in decoder.generate(PROMPTS, params)]
            if "rule" not in how or params.greedy:  # which draws by noise of its own
                assert found == expected, how


class Followed(PardDrafter):
    """Compares what each pass drafts with the model's own words on each row's whole text and MASKs
    behind it.
    """

    off = 0.0
    passes = longest = 0

    def _drafted(self, request: Round) -> Fed:
        fed, levels = super()._drafted(request), request.plan.levels
        self.longest = max(self.longest, int(self.unfed_B.max()))
        for row in request.active_B.nonzero()[:, 0].tolist():
            text_N = self.texts_BS[row, : int(request.lens_B[row]) + 1]
            ids_1T = behind(text_N, levels - 1)[None]
            own_KV = self.runner.model(input_ids=ids_1T).logits[0, -levels:]
            self.off = max(self.off, float((fed.logits_BFV[row] - own_KV).abs().max()))
            self.passes += 1
        return fed

    def reset(self, rows: int, slots: int) -> None:
        super().reset(rows, slots)
        self.texts_BS = torch.zeros(rows, self.pool.slots, dtype=torch.int64)

    def prefill(self, admitted: Any) -> None:
        super().prefill(admitted)
        admitted.write(self.texts_BS)

    def extend(self, kept: Kept) -> None:
        super().extend(kept)
        kept.write(self.texts_BS)


def behind(text_N: Tensor, masks: int) -> Tensor:
    return torch.cat([text_N, torch.full((masks,), MASK)])


@pytest.mark.parametrize("policy", ["fixed", "table:1-2=3,3-=0"])
def test_drafts_are_what_the_model_says_behind_masks(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, policy: str
) -> None:
    """The draft is the target itself, so that rows of one batch keep, and so feed, different
    numbers of tokens; with a policy that rests it takes in what it hasn't drafted.
    """
    tiny_target.config.pard_token, tiny_target.config.para_num = MASK, LEVELS
    try:
        own = Followed(tiny_target, len(tiny_tokenizer))
        decoder = Decoder(tiny_target, tiny_tokenizer, own, K=3, policy=policy, batch_size=3)
        for params in LONGER[:2]:
            found = [c.tokens for c in decoder.generate(PROMPTS, params)]
            assert found == truths(tiny_target, tiny_tokenizer, params)
    finally:
        del tiny_target.config.pard_token, tiny_target.config.para_num
    assert own.passes > 20 and own.longest > 1
    assert own.off < 2e-4


@pytest.mark.parametrize("mode", ["chain", "static", "dynamic"])
def test_rounds_are_recorded(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    draft: PreTrainedModel,
    mode: str,
) -> None:
    """And read nothing of the device."""
    pair, own = (tiny_target, tiny_tokenizer), lm_drafter(draft, len(tiny_tokenizer))
    decoder = Decoder(*pair, own, K=3, batch_size=3, **MODES[mode])
    reads_nothing(decoder, started(decoder, SETTINGS[1]))
    records(pair, lm_drafter(draft, len(tiny_tokenizer)), SETTINGS[1], K=3, **MODES[mode])


def test_a_folder_says_so(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    draft: PreTrainedModel,
    tmp_path: Path,
) -> None:
    """As published ones do, by the name of PARD or of vLLM; K is 8 where nothing is said."""
    path = save_draft(tmp_path / "drafter", draft, tiny_target, tiny_tokenizer)

    def opened() -> Drafter | None:
        return load_drafter(str(path), tiny_target, tiny_tokenizer)

    first = opened()
    assert isinstance(first, PardDrafter)
    assert (first.mask, first.levels) == (MASK, LEVELS)
    assert first.parameter_bytes == LMDrafter(draft, len(tiny_tokenizer)).parameter_bytes // LEVELS
    config = json.loads((path / "config.json").read_text())
    for change, expected in (
        ({"pard_token": None, "ptd_token_id": 7, "para_num": None}, (7, 8)),
        ({"pard_token": -1, "ptd_token_id": None}, None),
    ):
        changed = {key: value for key, value in (config | change).items() if value is not None}
        (path / "config.json").write_text(json.dumps(changed))
        found = opened()
        assert isinstance(found, LMDrafter)
        told = (found.mask, found.levels) if isinstance(found, PardDrafter) else None
        assert told == expected


def test_a_later_version_goes_on_and_short_texts_are_no_shorter(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, draft: PreTrainedModel
) -> None:
    """What waits in a row that was taken by another prompt while nothing was drafted counts for no
    more than that prompt has.
    """
    pair, vocab = (tiny_target, tiny_tokenizer), len(tiny_tokenizer)
    decoder = Decoder(*pair, lm_drafter(draft, vocab), K=4, batch_size=2)
    session = started(decoder, SETTINGS[0])
    session.swap_drafter(lm_drafter(draft, vocab))
    for _ in range(3):
        session.step()
    resting = Decoder(*pair, lm_drafter(draft, vocab), K=6, policy="table:1-2=6,3-=0", batch_size=3)
    short = [[7], [8], [9]]
    for texts in ([[7, 8, 9, 10, 11, 12]] * 3, short):
        found = [c.tokens for c in resting.generate(texts, LONGER[0])]
        assert found == truths(*pair, LONGER[0], texts)
    costs = Decoder(*pair, lm_drafter(draft, vocab), K=6, policy="cost")
    assert [c.tokens for c in costs.generate(short, SETTINGS[0])] == truths(
        *pair, SETTINGS[0], short
    )


def test_what_goes_token_by_token_is_refused(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    draft: PreTrainedModel,
    tmp_path: Path,
) -> None:
    path = save_draft(tmp_path / "drafter", draft, tiny_target, tiny_tokenizer)
    for name in ("easy:2", "ahead:2", "rapid:200"):
        with pytest.raises(ValueError, match="a drafter of kind pard, expected"):
            load_drafter(f"{name}+{path}", tiny_target, tiny_tokenizer)
    wrong = model(len(tiny_tokenizer))
    for mask, levels in ((len(tiny_tokenizer), 6), (MASK, -1)):
        wrong.config.pard_token, wrong.config.para_num = mask, levels
        with pytest.raises(ValueError, match="with 320 embeddings, expected one of these"):
            lm_drafter(wrong, len(tiny_tokenizer))
    own = lm_drafter(draft, len(tiny_tokenizer))
    with pytest.raises(ValueError, match="draft LM that drafts token by token"):
        check_mixing(own, SETTINGS[1], 0.2)
    with pytest.raises(ValueError, match="give K=6 or less"):
        Decoder(tiny_target, tiny_tokenizer, own, K=LEVELS + 1)
