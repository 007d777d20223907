"""TokenSwift's draft: a pass over a part of the keys and values, heads, and the row's own text.

Shapes as in decode/untrained/tokenswift.py.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import counting_target
from plain_decoding import plain_decode
from randomised import randomised
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import SETTINGS

from draftsmith.decode.drafters.load import has_folder, load_drafter
from draftsmith.decode.drafters.medusa import MedusaDrafter
from draftsmith.decode.drafting.base import Admitted, Frontier, Round
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import COUPLED
from draftsmith.decode.tree_shapes import chain_plan
from draftsmith.decode.untrained import tokenswift
from draftsmith.decode.untrained.tokenswift import SHARE, TokenSwiftDrafter, mixed
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import save_drafter
from draftsmith.models.heads.medusa import Medusa, MedusaConfig

TEXTS = [
    [(7 * i * i + 3 * row) % 30 + 2 for i in range(n)] for row, n in enumerate((70, 5, 41, 90))
]
WAYS = [replace(params, max_new_tokens=30) for params in SETTINGS]
TREES: list[dict[str, Any]] = [
    {"K": 4},
    {"tree": "eagle-25", "K": 3},
    {"tree": "dynamic:4,3,9"},
    {"tree": "dynamic:3,3,9", "policy": "depth:0.1"},
]


def heads_of(target: PreTrainedModel, heads: int = 3) -> Medusa:
    """As the recipe's: they share the target's LM head."""
    rows = target.config.vocab_size
    head = Medusa(MedusaConfig(32, rows, heads, own_heads=False)).init_from(target)
    randomised(head.eval().requires_grad_(False))
    return head


def own_of(target: PreTrainedModel, vocab: int, budget: int = 40) -> TokenSwiftDrafter:
    return TokenSwiftDrafter(target, vocab, budget, MedusaDrafter(heads_of(target), target, vocab))


@pytest.fixture(scope="module")
def folder(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    path = tmp_path_factory.mktemp("heads") / "drafter"
    mark = fingerprint(tiny_target, tiny_tokenizer)
    about: dict[str, Any] = {"provenance": {}, "defaults": {}, "target_fingerprint": mark}
    made = heads_of(tiny_target)
    save_drafter(path, kind="medusa", model=made, tokenizer=tiny_tokenizer, **about)
    return path


def test_no_answer_changes(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Rows come and go: four prompts in three rows; and one by one, and all at once."""
    name = f"tokenswift:40+{folder}"
    own = load_drafter(name, tiny_target, tiny_tokenizer)
    assert own is not None and not has_folder(name)
    for params in WAYS:
        stops = () if params.ignore_eos else (0,)
        how: dict[str, Any] = {"vocab_size": len(tiny_tokenizer), "stop_ids": stops}
        expected = [
            plain_decode(tiny_target, t, params, index=i, **how) for i, t in enumerate(TEXTS)
        ]
        for tree, batch in zip(TREES, (3, 1, 16, 3), strict=True):
            decoder = Decoder(tiny_target, tiny_tokenizer, own, batch_size=batch, **tree)
            assert [c.tokens for c in decoder.generate(TEXTS, params)] == expected, tree


@pytest.mark.parametrize("params", WAYS[:2], ids=["greedy", "t1"])
def test_over_a_view_of_everything_the_first_token_is_always_right(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, params: SamplingParams
) -> None:
    own = own_of(tiny_target, len(tiny_tokenizer), 128)
    decoder = Decoder(tiny_target, tiny_tokenizer, own, K=4, batch_size=4)
    for done in decoder.generate(TEXTS, replace(params, max_new_tokens=15, ignore_eos=True)):
        assert done.counters.histogram[0] == 0


def test_heads_draft_from_the_state_that_the_pass_ends_with(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Over a view of everything that is the target's own; a text in which nothing comes twice."""
    vocab, tokens = len(tiny_tokenizer), list(range(2, 50))
    own = own_of(tiny_target, vocab, 64)
    request = begun(own, tokens, 60)
    feed = own.feed(request)
    with torch.no_grad():
        out = tiny_target(torch.tensor([[*tokens, 60]]), output_hidden_states=True)
    state_1H = out.hidden_states[-1][:, -1]
    want = [out.logits[:, -1, :vocab]]
    head = own.heads.head
    assert isinstance(head, Medusa)
    want += [(s @ tiny_target.lm_head.weight.T)[:, :vocab] for s in head.states(state_1H)]
    for depth, logits_1V in enumerate(want):
        got = feed(chain_frontier(depth, 70 + depth if depth else 60)).logits_BFV
        torch.testing.assert_close(got[:, 0], logits_1V, atol=1e-4, rtol=1e-4)


def begun(own: TokenSwiftDrafter, tokens: list[int], pending: int) -> Round:
    """A round after a prompt."""
    pool = own.whole.pool(1, len(tokens) + 64)
    ids_1N, lens_1 = torch.tensor([tokens]), torch.tensor([len(tokens)])
    rows_1, pending_1 = torch.zeros(1, dtype=torch.int64), torch.tensor([pending])
    own.whole.prefill(pool, rows_1, ids_1N, lens_1)
    own.share(pool)
    own.prefill(Admitted(rows_1, ids_1N, lens_1, pending_1))
    on_1, params = torch.tensor([True]), SamplingParams()
    return Round(chain_plan(4), lens_1, pending_1, on_1, len(tokens), params, COUPLED)


def chain_frontier(depth: int, token: int) -> Frontier:
    return Frontier(depth, torch.tensor([[token]]), None, torch.tensor([depth]))


def counted(text: list[int], path: list[int], vocab: int) -> tuple[Tensor, int]:
    """Shares [V] of what followed `path` in a text, and how often it did."""
    n = len(path)
    after = Counter(text[i + n] for i in range(len(text) - n) if text[i : i + n] == path)
    total = sum(after.values())
    return torch.tensor([after[v] / max(total, 1) for v in range(vocab)]), total


@pytest.mark.parametrize("by_last_token", [False, True])
def test_the_text_s_counts_are_a_plain_counter_s(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, by_last_token: bool
) -> None:
    """Two branches, three levels; the pending token is of the text. The twin that looks up a path's
    last token alone is told. What an older, longer answer left beyond the text counts for nothing.
    """
    vocab, tokens = len(tiny_tokenizer), [5, 6, 7, 9, 6, 7, 5, 6, 7, 9, 6, 8, 5, 6] * 4
    own = own_of(tiny_target, vocab, 64)
    request = begun(own, tokens, 7)
    own.text_BS[0, len(tokens) + 1 :] = 6
    bare, feed = own.heads, own.feed(request)
    zeros = torch.zeros(2, dtype=torch.int64)
    feed(chain_frontier(0, 7))
    guess = bare.feed(request)
    assert guess is not None
    paths, differ = [[6], [9]], 0.0
    frontier = Frontier(1, torch.tensor([[6, 9]]), zeros[None], zeros)
    for step in (None, ([0, 1], [7, 6]), ([0, 0], [9, 5])):
        if step is not None:
            of, new = step
            paths = [[*paths[i], token] for i, token in zip(of, new, strict=True)]
            depth = frontier.depth + 1
            frontier = Frontier(depth, torch.tensor([new]), torch.tensor([of]), zeros)
        got_2V = feed(frontier).logits_BFV[0].softmax(-1)
        base_V = guess(frontier._replace(depth=frontier.depth - 1)).logits_BFV[0, 0].softmax(-1)
        for node, path in enumerate(paths):
            known = path[-1:] if by_last_token else path
            shares_V, total = counted([*tokens, 7], known, vocab)
            assert total or path == [6, 7, 5] or not by_last_token
            want_V = (1 - SHARE) * base_V + SHARE * shares_V if total else base_V
            differ = max(differ, float((got_2V[node] - want_V).abs().max()))
    assert (differ < 1e-5) is not by_last_token


def test_what_is_known_from_the_text_is_drafted(
    tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that counts, after a text that does; random heads know nothing."""
    target = counting_target(len(tiny_tokenizer), 328)
    own = own_of(target, len(tiny_tokenizer), 128)
    params = SamplingParams(max_new_tokens=21, ignore_eos=True)
    found = []
    for share in (SHARE, 0.0):
        monkeypatch.setattr(tokenswift, "SHARE", share)
        decoder = Decoder(target, tiny_tokenizer, own, K=4)
        done = decoder.generate([[*range(20, 60), 20]], params)[0]
        assert done.tokens == list(range(21, 42))
        found.append(done.counters.rounds)
    assert found == [4, 10]


def test_an_unseen_path_leaves_the_law_as_it_is() -> None:
    torch.manual_seed(0)
    logits_BFV, text_BS = torch.randn(1, 2, 6), torch.tensor([[1, 2, 1, 3]])
    ends_BFS = torch.tensor([[[False] * 4, [True, False, True, False]]])
    got = mixed(logits_BFV, ends_BFS, text_BS)
    assert torch.equal(got[0, 0], logits_BFV[0, 0])
    want = (1 - SHARE) * logits_BFV[0, 1].softmax(-1)
    want[[2, 3]] += SHARE / 2
    torch.testing.assert_close(got[0, 1].exp(), want)


def test_a_call_s_share_of_the_bytes(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """The target's weights once, and each head's block and the LM head, over four calls."""
    own = own_of(tiny_target, len(tiny_tokenizer))
    layers = sum(p.nbytes for layer in tiny_target.model.layers for p in layer.parameters())
    lm_head, blocks = tiny_target.lm_head.weight.nbytes, 3 * (32 * 32 + 32) * 4
    assert abs(4 * own.parameter_bytes - (layers + 2 * lm_head + blocks)) < 16


def test_names_that_say_nothing(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    for name, says in (
        ("tokenswift:40", "kind None, expected tokenswift:BUDGET\\+FOLDER with the folder"),
        ("tokenswift:40+ngram", "kind ngram, expected tokenswift:BUDGET\\+FOLDER"),
        (f"tokenswift:39+{folder}", "expected snapkv:BUDGET with 40 slots to 512"),
        (f"tokenswift:x+{folder}", "expected snapkv:BUDGET"),
        (f"tokenswift:40+{folder}-none", "-none"),
    ):
        with pytest.raises(ValueError, match=says):
            load_drafter(name, tiny_target, tiny_tokenizer)
    own = load_drafter(f"tokenswift:40+{folder}", tiny_target, tiny_tokenizer)
    with pytest.raises(ValueError, match="drafts 4 tokens ahead; give K=4 or less"):
        Decoder(tiny_target, tiny_tokenizer, own, K=5)
