"""Taps: the states inside a target, by transformers' own output and by the decoder's two bodies."""

import pytest
import torch
from tapped import LAYERS, llama
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from draftsmith.decode.forward.lean import LeanBody
from draftsmith.decode.forward.runner import Runner, Seen
from draftsmith.models.taps import NORM, check_taps, default_taps, parted, target_states

TEXT_BT = torch.arange(26).view(2, 13) * 5 % 97


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=64)
    return GPT2LMHeadModel(config).eval().requires_grad_(False)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_taps_are_the_hidden_states_of_transformers(build) -> None:
    model = build()
    ids_BT = torch.arange(20).view(2, 10)
    whole = model.base_model(input_ids=ids_BT, output_hidden_states=True, use_cache=False)
    norm_BTG, taps_BTF = target_states(model, (NORM, 0, 2, LAYERS), input_ids=ids_BT)
    assert torch.equal(norm_BTG, whole.last_hidden_state)
    found = taps_BTF.split(32, -1)
    assert torch.equal(found[0], norm_BTG)
    assert torch.equal(found[1], whole.hidden_states[0])
    assert torch.equal(found[2], whole.hidden_states[2])
    # transformers keeps the last state after the norm alone: through the norm they are the same.
    norm = model.base_model.norm if build is llama else model.base_model.ln_f
    assert torch.equal(norm(found[3]), norm_BTG)
    assert not torch.allclose(found[3], norm_BTG)


def test_no_taps_no_states() -> None:
    assert (
        target_states(llama(), (), input_ids=torch.ones(1, 4, dtype=torch.long)).taps_BTF.numel()
        == 0
    )


@pytest.mark.parametrize("lean", [True, False])
def test_the_decoder_takes_the_same_states(lean: bool) -> None:
    """Ragged prompts, then four tokens each; by the lean body and by transformers' own."""
    taps = (0, 2, LAYERS, NORM)
    runner = Runner(llama(), 97, taps=taps)
    assert isinstance(runner.call, LeanBody)
    if not lean:
        runner.call = runner._whole
    want = [target_states(llama(), taps, input_ids=TEXT_BT[:1]).taps_BTF[0]]
    want.append(target_states(llama(), taps, input_ids=TEXT_BT[1:, :9]).taps_BTF[0])
    lens_B = torch.tensor([9, 5])
    pool = runner.pool(2, 32)
    at_BN = lens_B[:, None] + torch.arange(4)
    new_BN = TEXT_BT.gather(1, at_BN)
    with torch.inference_mode():
        _, prompt_BNU = runner.prefill(pool, torch.arange(2), TEXT_BT[:, :9], lens_B)
        _, new_BNU = runner.verify(pool, new_BN, at_BN, at_BN, Seen(lens_B, 64))
    assert prompt_BNU is not None and new_BNU is not None
    for row, length in enumerate(lens_B.tolist()):
        assert torch.allclose(prompt_BNU[row, :length], want[row][:length], atol=1e-5)
        assert torch.allclose(new_BNU[row], want[row][length:], atol=1e-5)


def test_default_taps() -> None:
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(8) == (2, 4, 5)
    assert [default_taps(n) for n in (1, 2, 3, 6)] == [(0, 1), (1,), (1, 2), (1, 3, 5)]


@pytest.mark.parametrize("taps", [(4,), (-1,), ("last",), (1.0,), (2, 2)])
def test_wrong_taps_are_refused(taps) -> None:
    with pytest.raises(ValueError, match=r"taps: got"):
        check_taps(taps, LAYERS)


def test_prompts_states_in_pieces() -> None:
    """Whole in one piece or over three: those that lie in one are not copied."""
    states_MF = torch.randn(20, 3)
    pieces, lens = states_MF.split(6), (2, 13, 4, 1)
    found = parted(pieces, lens)
    assert all(map(torch.equal, found, states_MF.split(lens)))
    place = states_MF.untyped_storage().data_ptr()
    shared = [x.untyped_storage().data_ptr() == place for x in found]
    assert shared == [True, False, False, True]
