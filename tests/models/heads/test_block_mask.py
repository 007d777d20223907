"""MASK as a token's embedding, and layers of Qwen3's kind: what other stacks' layouts ask for."""

import copy
from pathlib import Path

import pytest
import torch
from head_folders import equal_heads, made, ours
from tiny_heads import llama, text, words
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.models.folder.drafter_folder import open_drafter
from draftsmith.models.heads.block import Block, BlockConfig
from draftsmith.models.layouts.block_layouts import unread
from draftsmith.models.taps import block_taps
from draftsmith.train.drafts.blocks import BlockSource, open_block
from draftsmith.train.objectives.block import Anchors, BlockObjective
from draftsmith.train.teachers.states import OnlineTaps


def head_of(**settings: object) -> Block:
    source = BlockSource(kind="dflash", levels=3, layers=1, taps=[1], **settings)
    return open_block(source, llama(), words(90), seed=0)


def test_it_is_the_row_of_the_target_and_is_not_learnt() -> None:
    """Its gradient would be of the table, which nobody trains; the rest learns as ever."""
    own, theirs = head_of(mask_token=5), head_of()
    table = llama().get_input_embeddings().weight
    assert torch.equal(own.mask_H, table[5]) and not own.mask_H.requires_grad
    assert torch.equal(theirs.mask_H, theirs.mask)
    assert theirs.state_dict().keys() - own.state_dict().keys() == {"mask"}
    assert torch.equal(copy.deepcopy(own).mask_H, table[5])
    batch = text().batch(0, 0, 0, accumulation=1, world=1)
    losses = []
    for head in (own, theirs):
        if head is theirs:
            head.mask.data.copy_(table[5])
        states = OnlineTaps(llama(), head.taps)
        torch.manual_seed(0)
        loss = BlockObjective(Anchors(count=4), head, llama(), words(90), states)(batch).loss
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    learnt = {name for name, part in theirs.named_parameters() if part.grad is not None}
    assert learnt - {name for name, part in own.named_parameters() if part.grad is not None} == {
        "mask"
    }


def test_a_run_can_make_what_others_read() -> None:
    """Of a target of Llama's kind, whose layers have no norms on queries and keys."""
    head = head_of(mask_token=5, layer="qwen3")
    assert head.config.layer.model_type == "qwen3"
    theirs = llama().model.layers[-1].self_attn.q_proj.weight
    assert torch.equal(head.layers[0].self_attn.q_proj.weight, theirs)
    for to in ("vllm", "sglang", "speculators"):
        assert unread(to, head.to_json(), 2) is None
    assert "head.layer=qwen3" in str(unread("vllm", head_of(mask_token=5).to_json(), 2))


def test_it_is_saved_by_its_number(
    tmp_path: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    head = made("dspark", tiny_target, mask_token=9)
    folder = ours(tmp_path / "head", head, tiny_target, tiny_tokenizer)
    found = open_drafter(folder, None).head()
    equal_heads(found, head)
    assert isinstance(found, Block) and found.config.mask_token == 9


def test_bad_settings() -> None:
    layer = head_of().config.layer
    for token in (97, -2):
        with pytest.raises(ValueError, match=f"mask_token={token}, expected a token, 0 to 96"):
            BlockConfig(layer, (1,), mask_token=token)
    with pytest.raises(ValueError, match=r"head\.layer: got 'gpt2', expected one of llama, qwen3"):
        head_of(layer="gpt2")


def test_the_usual_taps_are_dflashs() -> None:
    """It names the layers 1, 9, 17, 25, 33 of 36, whose outputs are the states after 2, 10, ..."""
    assert block_taps(36) == (2, 10, 18, 26, 34)
