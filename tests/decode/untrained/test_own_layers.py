"""Drafts from the target's own layers: parts compute what they say, and no answer changes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from families import FAMILIES, made
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, changes_nothing, truths

from draftsmith.decode.drafters.load import has_folder, load_drafter
from draftsmith.decode.drafting.base import Round
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.forward.kv import KVPool
from draftsmith.decode.forward.lean import LeanBody
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.token_tree import TokenTree
from draftsmith.decode.untrained.own_layers import OwnLayersDrafter, skip_name, skip_set
from draftsmith.models.target import output_head

WAYS = [replace(params, max_new_tokens=14) for params in SETTINGS]
TREES: list[dict[str, Any]] = [
    {"K": 3},
    {"tree": "eagle-25", "K": 3},
    {"tree": "dynamic:3,3,9"},
    {"tree": "dynamic:3,3,9", "policy": "depth:0.1"},
]
NAMES = ["exit:0", "exit:2", "skip:1", "skip:0a+1m", "jacobi:3", "pads:3"]
IDS_BT = torch.arange(3, 23).view(2, 10) * 7 % 300


def zeroed(module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return torch.zeros_like(output[0]), *output[1:]
    return torch.zeros_like(output)


@torch.no_grad()
def obvious(model: PreTrainedModel, last: int, without: Any = ()) -> Tensor:
    """Final states of transformers' own pass, later layers and halves left out by hooks."""
    body, *_ = output_head(model)
    hooks = []
    for index, layer in enumerate(body.layers):  # type: ignore[arg-type, union-attr]
        gone = {half for half in ("attention", "mlp") if (index, half) in without or index >= last}
        if len(gone) == 2:
            hooks.append(layer.register_forward_hook(lambda m, args, out: args[0]))
        elif gone:
            half = layer.self_attn if gone == {"attention"} else layer.mlp
            hooks.append(half.register_forward_hook(zeroed))
    try:
        return body(input_ids=IDS_BT, use_cache=False).last_hidden_state  # type: ignore[no-any-return]
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_first_layers_alone_compute_what_they_do_inside(family: str) -> None:
    model = made(family)
    runner = Runner(model, 320)
    for last in range(1, 4):
        got = runner.part(last).states(IDS_BT)[0]
        torch.testing.assert_close(got, obvious(model, last), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("says", ["1a", "0m", "0a+2m", "1+2a"])
def test_halves_left_out(tiny_target: PreTrainedModel, says: str) -> None:
    runner, without = Runner(tiny_target, 200), skip_set(says, 3)
    assert isinstance(runner.call, LeanBody), "else halves are refused"
    got = runner.part(3, without).states(IDS_BT)[0]
    torch.testing.assert_close(got, obvious(tiny_target, 3, without), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(got, runner.states(IDS_BT)[0], atol=1e-2)


def test_whole_layers_of_any_family_can_go() -> None:
    model = made("gemma3")
    runner = Runner(model, 320)
    without = skip_set("1", 3)
    got = runner.part(3, without).states(IDS_BT)[0]
    torch.testing.assert_close(got, obvious(model, 3, without), atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="expected whole layers"):
        runner.part(3, {(1, "mlp")})


def test_a_body_that_cannot_be_split_is_refused() -> None:
    """One that scales its embeddings by its depth computes something else when it is cut."""
    model = made("gemma3")
    body, *_ = output_head(model)

    class Scaled(type(body)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
            embedded = self.embed_tokens(input_ids) * self.config.num_hidden_layers
            return super().forward(inputs_embeds=embedded, **kwargs)

    body.__class__ = Scaled
    runner = Runner(model, 320)
    runner.part(3)
    with pytest.raises(ValueError, match="first 2 layers that alone compute something else"):
        runner.part(2)


@pytest.mark.parametrize("name", NAMES)
def test_no_answer_changes(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    name: str,
) -> None:
    """Rows come and go: four prompts in three rows; and one by one, and all at once."""
    own = load_drafter(name, tiny_target, tiny_tokenizer)
    assert own is not None and not has_folder(name)
    trees = TREES if own.trees else [{"K": 3}, {"K": 1}]
    trials = [(tree, batch, WAYS) for tree, batch in zip(trees, (3, 1, 16, 3), strict=False)]
    changes_nothing((tiny_target, tiny_tokenizer), own, trials)


class Canary(OwnLayersDrafter):
    """Checks that drafting leaves the committed slots as they were; `harm` doesn't."""

    harm = False

    def propose(self, request: Round) -> TokenTree:
        before, pool = self.pool.kv_2LBSHE.clone(), self.pool
        tree = super().propose(request)
        if self.harm:
            pool.kv_2LBSHE[:, :, :, 2] += 1.0
        for row, length in enumerate(request.lens_B.tolist()):
            now = pool.kv_2LBSHE[:, :, row, :length]
            self.clean = self.clean and bool((now == before[:, :, row, :length]).all())
        return tree


@pytest.mark.parametrize("harm", [False, True])
def test_committed_slots_stay(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    harm: bool,
) -> None:
    """And the twin that writes there is told apart, by the slots and by the answers."""
    own = Canary("skip", tiny_target, len(tiny_tokenizer), 3, {(0, "attention")})
    own.clean, own.harm = True, harm
    decoder = Decoder(tiny_target, tiny_tokenizer, own, batch_size=3, tree="dynamic:3,3,9")
    got = [c.tokens for c in decoder.generate(PROMPTS, WAYS[1])]
    assert own.clean is not harm
    assert (got == truths(tiny_target, tiny_tokenizer, WAYS[1])) is not harm


@pytest.mark.parametrize("params", WAYS[:2], ids=["greedy", "t1"])
def test_all_layers_draft_what_the_target_says(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, params: Any
) -> None:
    own = load_drafter("exit:3", tiny_target, tiny_tokenizer)
    decoder = Decoder(tiny_target, tiny_tokenizer, own, K=3)
    for done in decoder.generate(PROMPTS, replace(params, max_new_tokens=17, ignore_eos=True)):
        assert done.counters.histogram == [0, 0, 0, 4]


def test_it_drafts_in_the_target_s_own_pool(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    own = OwnLayersDrafter("exit", tiny_target, len(tiny_tokenizer), 1, set())
    made_pools: list[KVPool] = []
    pool = own.runner.pool
    own.runner.pool = lambda *sizes: made_pools.append(pool(*sizes)) or made_pools[-1]  # type: ignore[func-returns-value, method-assign]
    decoder = Decoder(tiny_target, tiny_tokenizer, own, K=2)
    decoder.generate(PROMPTS[:1], WAYS[0])
    assert not made_pools and decoder._batch is not None
    assert own.pool.kv_2LBSHE.data_ptr() == decoder._batch.pool.kv_2LBSHE.data_ptr()
    assert own.size.kv(4, 512) == 0


def test_bytes_read(tiny_target: PreTrainedModel) -> None:
    whole = OwnLayersDrafter("exit", tiny_target, 200, 3, set()).parameter_bytes
    none = OwnLayersDrafter("exit", tiny_target, 200, 0, set()).parameter_bytes
    halves = OwnLayersDrafter("skip", tiny_target, 200, 3, skip_set("0a+1m+2", 3)).parameter_bytes
    rest = OwnLayersDrafter("skip", tiny_target, 200, 3, skip_set("0m+1a", 3)).parameter_bytes
    assert none == output_head(tiny_target)[1].nbytes
    assert halves + rest == whole + none


def test_jacobi_guesses_the_choices_after_what_was_kept(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """n tokens take at most n rounds, and a target that repeats itself takes n / (K + 1)."""
    own = load_drafter("jacobi:4", tiny_target, tiny_tokenizer)
    decoder = Decoder(tiny_target, tiny_tokenizer, own, K=4)
    for done in decoder.generate(PROMPTS, replace(WAYS[0], max_new_tokens=40, ignore_eos=True)):
        assert done.counters.rounds <= 39
    with torch.no_grad():  # of a target that says one token for ever, every guess comes true
        head = tiny_target.get_output_embeddings().weight.detach().clone()
        tiny_target.get_output_embeddings().weight.zero_()
    try:
        decoder = Decoder(tiny_target, tiny_tokenizer, own, K=4)
        (done,) = decoder.generate(
            PROMPTS[:1], replace(WAYS[0], max_new_tokens=41, ignore_eos=True)
        )
        assert done.counters.rounds == 8
    finally:
        with torch.no_grad():
            tiny_target.get_output_embeddings().weight.copy_(head)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("exit:4", "expected exit:E with E layers, 0 to 3"),
        ("exit:x", "expected exit:E"),
        ("skip:3", "expected layers 0 to 2 joined by +"),
        ("skip:0b", "expected layers 0 to 2 joined by +"),
        ("skip:0+1+2", "leaves nothing of 3 layers"),
        ("jacobi:0", "expected jacobi:K, of 1 to 511"),
        ("pads:x", "got pads:x for a target whose pad_token_id is 1, expected pads:K"),
    ],
)
def test_names_that_say_nothing(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, name: str, says: str
) -> None:
    with pytest.raises(ValueError, match=says.replace("+", r"\+")):
        load_drafter(name, tiny_target, tiny_tokenizer)


def test_a_set_has_one_name() -> None:
    assert skip_name(skip_set("6m+3+5a", 8)) == "3+5a+6m"
    assert skip_set(skip_name(skip_set("0a+0m+7", 8)), 8) == skip_set("0+7", 8)
