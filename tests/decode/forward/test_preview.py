"""A preview of an LM head: what may be drafted has its exact logit, in torch and in C++, and no
answer changes.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from head_folders import made, ours
from saved_drafts import save_draft
from serial_heads import serial
from several_rounds import drafted_in_rounds
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafters.block import BlockDrafter
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.drafting.base import Fed, Frontier, Round
from draftsmith.decode.drafting.grow_tree import corrected, grow
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.forward.compiled import library
from draftsmith.decode.forward.product import BEST, Preview, VocabHead
from draftsmith.decode.policies.timing import round_of
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import COUPLED
from draftsmith.decode.tree_shapes import DynamicTree, Plan, chain_plan
from draftsmith.models.folder.drafter_folder import save_defaults
from draftsmith.models.heads.block import Block, BlockConfig

V, H, RANK = 4096, 64, 32


def near(rank: int, rest: float, rows: int = V) -> Tensor:
    """A matrix [rows, H] of a rank, and that much of any."""
    noise = torch.Generator().manual_seed(0)
    low = torch.randn(rows, rank, generator=noise) @ torch.randn(rank, H, generator=noise)
    return low / rank**0.5 + rest * torch.randn(rows, H, generator=noise)


@pytest.mark.parametrize("bias", [False, True])
def test_the_best_have_exact_logits_and_others_foretold_ones(bias: bool) -> None:
    ids_D, states_BFH = torch.arange(0, V, 4), torch.randn(2, 3, H)
    rows_DH = near(RANK, 0.1, len(ids_D))
    head = VocabHead(rows_DH, ids_D, V, torch.randn(len(ids_D)) if bias else None)
    exact_BFV = head.logits(states_BFH)
    head.foretell(RANK)
    found_BFV = head.logits(states_BFH)
    near_BFV = found_BFV.isclose(exact_BFV, atol=1e-4)
    best_BFM = exact_BFV.topk(8).indices
    assert near_BFV.gather(-1, best_BFM).all() and near_BFV.sum(-1).min() >= BEST
    assert not near_BFV[..., ids_D].all() and found_BFV.isneginf().equal(exact_BFV.isneginf())
    assert (found_BFV - exact_BFV)[..., ids_D].abs().max() < 4
    whole = VocabHead(near(RANK, 0.0), None, V)  # nothing is lost of a matrix of that rank
    exact_BFV = whole.logits(states_BFH)
    whole.foretell(RANK)
    assert torch.allclose(whole.logits(states_BFH), exact_BFV, atol=1e-3)
    # Tokens that only the noise would make win; one that isn't drafted stays out.
    ids_BFM = torch.tensor([3, 4, 8, 400]).expand(2, 3, -1)
    exact_BFV = VocabHead(rows_DH, ids_D, V, *head.tensors[1]).logits(states_BFH)
    got_BFV = head.corrected(found_BFV, states_BFH, ids_BFM)
    assert got_BFV[..., 3].isneginf().all()
    torch.testing.assert_close(got_BFV[..., [4, 8, 400]], exact_BFV[..., [4, 8, 400]])
    assert got_BFV[..., 12:400:4].equal(found_BFV[..., 12:400:4])


@pytest.mark.parametrize("rank", [0, 8, 40, H, 32.0, "32", True])
def test_ranks_that_are_of_no_use_are_refused(rank: Any) -> None:
    told = f"got a rank of {rank!r}, expected a multiple of 16 below"
    with pytest.raises(ValueError, match=told):
        VocabHead(near(RANK, 0.1), None, V).foretell(rank)


@pytest.fixture(scope="module")
def block() -> BlockDrafter:
    """One in bf16 whose LM head is of a rank, nearly."""
    torch.manual_seed(0)
    sizes = {"hidden_size": H, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 32}
    config = LlamaConfig(vocab_size=V, num_hidden_layers=2, num_key_value_heads=1, **sizes)
    target = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    target.lm_head.weight.copy_(near(RANK, 0.1))
    config = LlamaConfig(vocab_size=V, num_hidden_layers=1, num_key_value_heads=1, **sizes)
    head = Block(BlockConfig(config, (1, 2), 4, light="layer")).init_from(target)
    head.requires_grad_(False).norm.weight.fill_(0.5)
    torch.nn.init.normal_(head.light.entry.weight, std=0.5)
    made = BlockDrafter(head.bfloat16(), target.bfloat16(), V)
    made.reset(2, 128)
    made.state_BH.copy_(torch.randn(2, H))
    return made


def asked(temperature: float) -> Round:
    request = round_of(chain_plan(4), 2, V, torch.device("cpu"))
    lens_B, pending_B = torch.tensor([20, 9]), torch.tensor([17, 5])
    request = replace(request, lens_B=lens_B, pending_B=pending_B, top=20)
    if not temperature:
        return request
    race_BDV = torch.rand(2, 4, V, generator=torch.Generator().manual_seed(1)).log().neg().log()
    params = SamplingParams(temperature=temperature)
    return replace(request, params=params, race_BDV=race_BDV, law=COUPLED)


@pytest.mark.skipif(library() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("way", ["at once", "call by call", "several rounds a call"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@torch.inference_mode()
def test_the_same_is_drafted(block: BlockDrafter, temperature: float, way: str) -> None:
    request, head = asked(temperature), block.lm_head

    def drafted() -> Tensor:
        if way == "call by call":
            return grow(request, block.feed(request), block.per_node)[0].tokens_BN
        tree = block.propose(request)
        return tree.tokens_BN if way == "at once" else drafted_in_rounds(block, request, tree)

    head.preview = None
    whole_BN = drafted()
    head.foretell(RANK)
    assert drafted().equal(whole_BN) and len(whole_BN.unique()) > 5
    assert block.per_node is head and head.bytes_read < 0.6 * head.weight.nbytes
    # A twin: one that foretells other tokens' logits.
    head.preview = Preview(head.weight.roll(1500, 0), RANK)
    assert not drafted().equal(whole_BN)


@pytest.mark.parametrize("tree", [chain_plan(4), DynamicTree(3, 3, 9)], ids=["chain", "tree"])
@torch.inference_mode()
def test_what_noise_makes_win_is_found(block: BlockDrafter, tree: Plan) -> None:
    """By a law so flat that it isn't among the likeliest; not where the logits are to be a law."""
    request, head = replace(asked(1.0), plan=tree), block.lm_head
    head.preview, ranks = None, list[int]()
    flat = replace(request, params=SamplingParams(temperature=4.0))
    feed = block.feed(flat)

    def noted(frontier: Frontier) -> Fed:
        fed = feed(frontier)
        assert flat.race_BDV is not None
        won_BF = (fed.logits_BFV / 4 - flat.race_BDV[:, frontier.depth, None]).argmax(-1)
        best_BF1 = fed.logits_BFV.gather(-1, won_BF[..., None])
        ranks.extend((fed.logits_BFV > best_BF1).sum(-1).flatten().tolist())
        return fed

    whole_BN = grow(flat, noted)[0].tokens_BN
    head.foretell(RANK)
    assert grow(flat, block.feed(flat), head)[0].tokens_BN.equal(whole_BN)
    assert max(ranks) > 4 * BEST
    lawful = replace(flat, want_q=True)
    feed = block.feed(lawful)
    assert corrected(lawful, feed, head) is feed and corrected(flat, feed, head) is not feed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["lm", "eagle1", "eagle3", "mtp", "mixture", "clover2", "layer"])
def test_no_answer_changes(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    kind: str,
    temperature: float,
) -> None:
    folder, pair = tmp_path / "drafter", (tiny_target, tiny_tokenizer)
    if kind == "lm":
        save_draft(folder, tiny_draft, *pair, provenance={}, defaults={"K": 3})
    else:
        own = {"mixture": partial(serial, kind), "layer": partial(made, "block", light="layer")}
        ours(folder, own.get(kind, partial(made, kind))(tiny_target), *pair)
    save_defaults(folder, preview=16)
    params = SamplingParams(temperature=temperature, max_new_tokens=16, ignore_eos=True)
    prompts = [[5 + i, 9, 30 + i] for i in range(4)]
    plain = Decoder(*pair).generate(prompts, params)
    for tree in ("chain", "dynamic:3,4,10"):
        drafter = load_drafter(str(folder), *pair)
        assert drafter is not None and drafter.per_node is not None
        assert drafter.per_node.preview is not None
        done = Decoder(*pair, drafter, K=3, tree=tree, batch_size=3).generate(prompts, params)
        assert [one.tokens for one in done] == [one.tokens for one in plain]


@pytest.mark.parametrize("kind", ["medusa", "falcon-2", "dspark", "peagle"])
def test_a_drafter_that_reads_its_lm_head_once_has_none(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, kind: str
) -> None:
    ours(tmp_path / "head", made(kind, tiny_target), tiny_target, tiny_tokenizer)
    save_defaults(tmp_path / "head", preview=16)
    with pytest.raises(ValueError, match=r"preview: got 16 for a drafter of kind .* leave it out"):
        load_drafter(str(tmp_path / "head"), tiny_target, tiny_tokenizer)
