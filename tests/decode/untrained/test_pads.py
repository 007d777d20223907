"""Prompts behind every guess: no answer changes, and what is guessed is what the target says behind
its text and prompts.
"""

from typing import Any

import pytest
import torch
from rounds import reads_nothing, records, started
from tiny_llama import build_llama
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.drafting.base import Kept, Round
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import TokenTree
from draftsmith.decode.untrained.pads import PromptsDrafter

ASKED = 3


@pytest.fixture(scope="module")
def target(tiny_tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """With embeddings of three tokens that the tokenizer doesn't know, as they come."""
    rows = len(tiny_tokenizer) + ASKED
    return build_llama(rows, layers=2, hidden=32, seed=4).requires_grad_(False)


class Asking(PromptsDrafter):
    """Compares its guesses with the target's own words behind each row's text and prompts."""

    seen = right = 0
    target: Any = None

    def reset(self, rows: int, slots: int) -> None:
        super().reset(rows, slots)
        self.text_BS = torch.zeros(rows, slots + 32, dtype=torch.int64)

    def prefill(self, admitted: Any) -> None:
        super().prefill(admitted)
        admitted.write(self.text_BS)

    def propose(self, request: Round) -> TokenTree:
        tree = super().propose(request)
        assert tree.topology.nodes <= request.plan.nodes
        return tree

    def extend(self, kept: Kept) -> None:
        super().extend(kept)
        kept.write(self.text_BS)
        if kept.params.greedy and self.shape[1] == ASKED:
            for row in (kept.n_new_B > 0).nonzero()[:, 0].tolist():
                end = int(
                    kept.lens_B[row] + kept.n_new_B[row]
                )  # of the text before the pending one
                read_N = torch.cat([self.text_BS[row, :end], self.prompt_K])
                said_K: Tensor = self.target(read_N[None]).logits[0, -ASKED:]
                self.right += int(
                    (said_K[:, : self.prompt_K[0]].argmax(-1) == self.guess_BK[row]).sum()
                )
                self.seen += ASKED


@pytest.mark.parametrize("K", [2, 3, 8, 15])
def test_no_answer_changes(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, K: int
) -> None:
    """Rows come and go; a plan of few nodes asks less, and verifies nothing."""
    own = Asking.named("ppd", f"{ASKED}", target, len(tiny_tokenizer))
    own.target = target
    for params in SETTINGS:
        decoder = Decoder(target, tiny_tokenizer, own, K=K, batch_size=3)
        found = [c.tokens for c in decoder.generate(PROMPTS, params)]
        assert found == truths(target, tiny_tokenizer, params)
    assert (own.seen > 0) == (K == 15) and own.right >= 0.99 * own.seen


def test_rounds_read_nothing_and_are_recorded(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    def own() -> Any:
        return load_drafter("ppd:3", target, tiny_tokenizer)

    decoder = Decoder(target, tiny_tokenizer, own(), K=15, batch_size=3)
    reads_nothing(decoder, started(decoder, SETTINGS[1]))
    records((target, tiny_tokenizer), own(), SETTINGS[1], K=15)


def test_a_target_without_prompts_is_refused(
    tiny_target: PreTrainedModel, target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    for model, name in ((tiny_target, "ppd:1"), (target, "ppd:4"), (target, "ppd:x")):
        with pytest.raises(ValueError, match="expected ppd:M, of at most as many prompts"):
            load_drafter(name, model, tiny_tokenizer)


def test_what_would_keep_a_prompt_is_refused_and_a_grammar_knows_none(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    own: Any = load_drafter("ppd:3", target, tiny_tokenizer)
    for lossy in ("typical", "lenience:0.5"):
        with pytest.raises(ValueError, match="of whose tokens the target has no law"):
            Decoder(target, tiny_tokenizer, own, K=15, lossy=lossy, allow_lossy=True)
    schema = '{"type": "array", "items": {"type": "integer"}, "maxItems": 3}'
    params = SamplingParams(1.0, max_new_tokens=24, seed=3, json_schema=schema)
    plain, found = (
        Decoder(target, tiny_tokenizer, drafter, K=15).generate(PROMPTS[:2], params)
        for drafter in (None, own)
    )
    assert [(c.tokens, c.finish_reason) for c in found] == [
        (c.tokens, c.finish_reason) for c in plain
    ]
