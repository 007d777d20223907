"""The law of whole answers under rules by rejection, counted: through the engine's drafter, noise,
rule and commit. Every rule alone is exact by enumeration (`test_rejection.py`); what only the
engine can break is which noise meets which.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chi_square import chi_square_p
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.decode import sampling
from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafting import grow_tree as growth
from draftsmith.decode.engine import round as step
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams

VOCAB, TOKENS, ANSWERS = 4, 3, 3072
PROMPT = [1, 2]
# Token 0 is an ordinary one: noise that is shared by mistake meets there. The root's
# children of ranks 1 and 2 are its first two draws.
TREES = {"chain": "chain", "tree": [[1], [2], [1, 0], [1, 1], [2, 0], [1, 0, 0]]}
RULES = [
    ("leviathan", "chain"),
    ("block", "chain"),
    ("recursive", "chain"),
    ("recursive", "tree"),
    ("k-seq", "tree"),
    ("traversal", "tree"),
    ("multi-draft", "chain"),
    ("multi-draft", "tree"),
]


def tiny(seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=32, initializer_range=0.5,
        eos_token_id=None, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.lm_head.weight.mul_(2)  # laws that differ enough for a round to reject often
    return model


@torch.inference_mode()
def law_of_answers(model: LlamaForCausalLM) -> Tensor:
    """The target's probability of every answer, [VOCAB ** TOKENS], the first token slowest."""
    answers = torch.cartesian_prod(*[torch.arange(VOCAB)] * TOKENS)
    ids = torch.cat([torch.tensor(PROMPT).expand(len(answers), -1), answers], 1)
    log_p = model(ids).logits.double().log_softmax(-1)[:, len(PROMPT) - 1 : -1]
    return log_p.gather(2, answers[..., None]).sum((1, 2)).exp()


def p_of_counts(rule: str, shape: str, tmp_path: Path) -> float:
    """How likely the answers counted are, or less likely ones, if they follow the target's law."""
    words = WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    target, tree = tiny(31), TREES[shape]
    if shape == "tree":
        tree = str(tmp_path / "tree.json")
        Path(tree).write_text(json.dumps(TREES[shape]))
    drafter = LMDrafter(tiny(32), VOCAB)
    decoder = Decoder(
        target, tokenizer, drafter, K=3, tree=tree, rule=rule, batch_size=ANSWERS // 2
    )
    params = SamplingParams(temperature=1.0, max_new_tokens=TOKENS, seed=3)
    answers = torch.tensor([c.tokens for c in decoder.generate([PROMPT] * ANSWERS, params)])
    place = VOCAB ** torch.arange(TOKENS - 1, -1, -1)
    counts = torch.bincount((answers * place).sum(1), minlength=VOCAB**TOKENS).double()
    # Answers that are rarely to be seen are counted together.
    law = law_of_answers(target)
    rare = law * ANSWERS < 8
    counts, law = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, law))
    return chi_square_p(counts, law)


@pytest.mark.parametrize(("rule", "shape"), RULES)
def test_answers_follow_the_targets_law(rule: str, shape: str, tmp_path: Path) -> None:
    assert p_of_counts(rule, shape, tmp_path) > 1e-3


def same_stream(self: step.Stepper, rows: Any, stream: int) -> Tensor:
    """Acceptance noise = draft noise."""
    stream = sampling.DRAFT if stream == sampling.ACCEPT else stream
    return sampling.position_keys(rows.seeds_B, rows.rounds_B[:, None], stream)[:, 0]


def roots_noise(self: step.Stepper, rows: Any, stream: int) -> Tensor:
    """Residual noise = draft noise of node 0."""
    if stream != sampling.RESIDUAL:
        return sampling.position_keys(rows.seeds_B, rows.rounds_B[:, None], stream)[:, 0]
    draft_B = sampling.position_keys(rows.seeds_B, rows.rounds_B[:, None], sampling.DRAFT)[:, 0]
    return sampling.position_keys(draft_B, torch.zeros_like(draft_B)[:, None])[:, 0]


def by_rank(request: Any, q_logits_BFV: Tensor, depth: int, level: Any) -> Tensor:
    """Draws without replacement by what q says, without noise."""
    return growth._best(q_logits_BFV, level.siblings, level.of_C, level.order_C)


def by_gap(request: Any, q_logits_BFV: Tensor, depth: int, level: Any) -> Tensor:
    """Of the draws without replacement those of the tree's ranks: not the first ones."""
    scores_BFV = q_logits_BFV - growth._own_race(request, level.fed_F, q_logits_BFV)
    return growth._best(scores_BFV, level.breadth, level.of_C, level.rank_C)


KEYS, DRAW = (
    "draftsmith.decode.engine.round.Stepper._round_keys",
    "draftsmith.decode.drafting.grow_tree._draw",
)
TWINS: dict[str, tuple[str, str, str, Callable]] = {
    "acceptance": ("leviathan", "chain", KEYS, same_stream),
    "residual": ("recursive", "chain", KEYS, roots_noise),
    "no noise": ("recursive", "tree", DRAW, by_rank),
    "gaps": ("recursive", "tree", DRAW, by_gap),
}


@pytest.mark.parametrize("twin", TWINS)
def test_noise_that_meets_the_wrong_noise_fails(
    twin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, shape, name, broken = TWINS[twin]
    monkeypatch.setattr(name, broken)
    assert p_of_counts(rule, shape, tmp_path) < 1e-6
