"""Prompts behind a text, against one pass for each number of them.

Shapes as in train/tuning/prompts.py.
"""

import pytest
import torch
from four_steps import some_batch
from tiny_llama import build_llama
from transformers import PreTrainedTokenizerFast

from draftsmith.train.losses.pure import forward_kl
from draftsmith.train.tuning.prompts import Prompts, PromptsObjective, with_prompts
from draftsmith.train.tuning.windows import windows

COUNT, DECAY = 3, 0.7


@pytest.mark.parametrize("phase", [0, 2])
def test_the_loss_is_that_of_one_pass_for_each_number_of_prompts(
    tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, phase: int
) -> None:
    """And its gradient is of the prompts alone."""
    known, batch, how = len(tiny_tokenizer), some_batch(2, 17), Prompts(count=COUNT, decay=DECAY)
    batch.loss_mask[:] = True
    batch.loss_mask[0, :5] = batch.loss_mask[1, 9] = batch.loss_mask[:, -1] = False
    model = with_prompts(build_llama(known, layers=2, hidden=32, seed=2), how, known)
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table[known:] += torch.randn(COUNT, 32, generator=torch.Generator().manual_seed(0))
    objective = PromptsObjective(model, how, vocab_size=known)
    monkeypatch.setattr(torch, "rand", lambda *_: torch.tensor(phase / (COUNT + 1)))
    found = objective(batch)
    found.loss.backward()
    got_VH, table.grad = table.grad, None
    assert not got_VH[:known].any() and got_VH[known:].any(1).all()

    with torch.no_grad():
        p_BTV = model(batch.input_ids).logits[..., :known]
    begin_BT, expected, asked = windows(batch, COUNT + 1, phase=phase), torch.zeros(()), 0
    for row, ids_T in enumerate(batch.input_ids):
        for at in range(len(ids_T) - 1):
            begin = int(begin_BT[row, at])
            if begin and begin == begin_BT[row, at + 1]:
                many = at + 1 - begin
                read_N = torch.cat([ids_T[:begin], known + torch.arange(many)])
                q_V = model(read_N[None]).logits[0, -1, :known]
                loss = forward_kl(p_BTV[row, at, None], q_V[None])[0]
                expected, asked = expected + DECAY ** (many - 1) * loss, asked + 1
    expected.backward()
    torch.testing.assert_close(found.loss, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got_VH[known:], table.grad[known:], rtol=2e-3, atol=2e-4)
    assert found.metrics["asked"] == asked > 8
