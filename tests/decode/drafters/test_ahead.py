"""Drafts made one round ahead: no answer changes, what was foreseen is what would be drafted, and
the target's pass and the draft's are at work at once.
"""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_drafts import save_draft
from tiny_llama import build_llama
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, changes_nothing, truths

from draftsmith.decode.draft_lms.ahead import AheadDrafter
from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.drafting.base import Round
from draftsmith.decode.drafting.foreseen import Foreseen
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import TokenTree

WAYS = [replace(params, max_new_tokens=24) for params in SETTINGS]


@pytest.fixture(scope="module")
def near(tiny_target: LlamaForCausalLM) -> LlamaForCausalLM:
    """The target with noise on its LM head: right about half of the time."""
    made = type(tiny_target)(tiny_target.config)
    made.load_state_dict(tiny_target.state_dict())
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        weight = made.lm_head.weight
        weight.add_(torch.randn(weight.shape, generator=noise) * weight.std() * 0.3)
    return made.eval().requires_grad_(False)


class Watched(AheadDrafter):
    """Compares a chain that was ready with what the draft LM then drafts in the ordinary way;
    counts both outcomes. shift: the twin guesses and drafts by the noise of positions so far off.
    """

    came = missed = shift = 0

    def _came(self, ready: Foreseen, request: Round) -> TokenTree | None:
        tree = super()._came(ready, request)
        if tree is None:
            self.missed += 1
            return None
        self.came += 1
        want = LMDrafter.propose(self, request)
        mine_BN, theirs_BN = (one.tokens_BN[request.active_B] for one in (tree, want))
        assert torch.equal(mine_BN, theirs_BN), (mine_BN, theirs_BN)
        return tree

    def _foresee(self, request: Round, lens_B: Tensor, tree: TokenTree) -> Tensor:
        if self.shift and (race := request.race) is not None:
            request = replace(request, race=lambda at_BM: race(at_BM + self.shift))
        return super()._foresee(request, lens_B, tree)


@pytest.mark.parametrize("kind", [pytest.param("random", marks=pytest.mark.slow), "near", "target"])
def test_no_answer_changes(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    near: PreTrainedModel,
    kind: str,
) -> None:
    """Rows come and go: four prompts in one row, in three, and in sixteen."""
    pair, size = (tiny_target, tiny_tokenizer), len(tiny_tokenizer)
    noise = build_llama(size, layers=1, hidden=32, seed=3)
    model = {"random": noise, "near": near, "target": tiny_target}[kind]
    drafter = AheadDrafter(LMDrafter(model, size), 2)
    changes_nothing(pair, drafter, [({"K": 4}, 1, WAYS[1:2]), ({"K": 2}, 3, WAYS)])
    changes_nothing(pair, drafter, [({"K": 3}, 16, WAYS[1:]), ({"policy": "auto"}, 3, WAYS[1:2])])
    changes_nothing(pair, drafter, [({"K": 4, "policy": "depth:0.3"}, 2, WAYS[1:2])])


@pytest.mark.parametrize("params", WAYS, ids=["greedy", "t1", "filtered"])
def test_what_was_foreseen_is_what_would_be_drafted(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    near: PreTrainedModel,
    params: SamplingParams,
) -> None:
    drafter = Watched(LMDrafter(near, len(tiny_tokenizer)), 2)
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, K=3)
    decoder.generate(PROMPTS, params)
    assert drafter.came >= 5 and drafter.missed, (drafter.came, drafter.missed)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_draft_that_is_right_is_ready_in_every_round(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, rows: int
) -> None:
    """But for the first."""
    drafter = Watched(LMDrafter(tiny_target, len(tiny_tokenizer)), 1)
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, K=4, batch_size=rows)
    params = replace(WAYS[1], ignore_eos=True)
    done = decoder.generate(PROMPTS, params)
    assert [c.tokens for c in done] == truths(tiny_target, tiny_tokenizer, params)
    rounds = sum(c.counters.rounds for c in done)
    assert drafter.missed == 0 and drafter.came * rows == rounds - 4


def test_the_noise_of_other_positions_foresees_nothing(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """The twin of the one above: answers stay, and hardly a round was foreseen."""
    drafter = Watched(LMDrafter(tiny_target, len(tiny_tokenizer)), 1)
    drafter.shift = 1
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, K=4)
    params = replace(WAYS[1], ignore_eos=True)
    done = decoder.generate(PROMPTS[:2], params)
    assert [c.tokens for c in done] == truths(tiny_target, tiny_tokenizer, params)[:2]
    assert drafter.missed > 2 * drafter.came


def test_both_are_at_work_at_once(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """The target's pass waits for the draft's first call of the next round, which would never come
    if it were made after it.
    """
    drafter = AheadDrafter(LMDrafter(tiny_target, len(tiny_tokenizer)), 1)
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, K=2)
    begun, verify, draft = threading.Event(), decoder.runner.verify, drafter.runner.verify

    def verified(*given: Any, **how: Any) -> Any:
        assert begun.wait(60), "nothing was drafted meanwhile"
        begun.clear()
        return verify(*given, **how)

    def drafted(*given: Any, **how: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
        return draft(*given, **how)

    decoder.runner.verify, drafter.runner.verify = verified, drafted  # type: ignore[method-assign]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    assert len(decoder.generate(PROMPTS[:1], params)[0].tokens) == 12


def test_names_that_say_nothing(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    draft = build_llama(len(tiny_tokenizer), layers=1, hidden=32, seed=3)
    folder = save_draft(tmp_path / "drafter", draft, tiny_target, tiny_tokenizer)
    for name, says in (
        ("ahead:2", "kind None, expected ahead:F\\+FOLDER"),
        (f"ahead:9+{folder}", "1 to 8 guesses"),
        ("ahead:2+ngram", "kind ngram, expected ahead:F\\+FOLDER"),
    ):
        with pytest.raises(ValueError, match=says):
            load_drafter(name, tiny_target, tiny_tokenizer)
    own = load_drafter(f"ahead:2+{folder}", tiny_target, tiny_tokenizer)
    with pytest.raises(ValueError, match="drafts chains only; use tree=chain"):
        Decoder(tiny_target, tiny_tokenizer, own, tree="eagle-25")
