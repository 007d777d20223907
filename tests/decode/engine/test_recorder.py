"""What the recorder keeps of a round is what happened in it."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.recorder import Columns, Recorder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.sampling import request_race


def recorded(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    **how: object,
) -> tuple[dict[int, Columns], list[Completion]]:
    found: dict[int, Columns] = {}
    drafter = LMDrafter(draft, len(tokenizer))
    decoder = Decoder(target, tokenizer, drafter, Recorder(found.__setitem__), batch_size=2, **how)
    done = decoder.generate(PROMPTS, SETTINGS[1])
    return found, done


@pytest.mark.parametrize("how", [{"K": 3}, {"K": 3, "same_shape": True}, {"tree": "eagle-25"}])
def test_what_is_recorded_is_what_happened(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    how: dict[str, object],
) -> None:
    found, done = recorded(tiny_target, tiny_draft, tiny_tokenizer, **how)
    assert sorted(found) == list(range(len(PROMPTS)))
    for completion in done:
        columns, counters = found[completion.index], completion.counters
        assert int(columns["round"].max()) + 1 == counters.rounds
        assert len(columns["token"]) == counters.nodes
        text = completion.prompt_tokens + completion.tokens
        kept = columns["kept"] & columns["on_path"]
        if "same_shape" not in how:
            assert int(kept.sum()) >= counters.emitted - counters.rounds  # the last round is cut
        inside = kept & (columns["position"] < len(text))
        for position, token in zip(
            columns["position"][inside].tolist(), columns["token"][inside].tolist(), strict=True
        ):
            assert text[position] == token
        check_numbers(tiny_target, tiny_draft, text, completion.index, columns)
        check_paths(columns)


def check_paths(columns: Columns) -> None:
    """Log q of a node's whole path, added up; ranks are those of brothers in their order."""
    names = ("round", "node", "parent", "log_q", "path", "rank")
    path, born = dict[tuple[int, int], float](), dict[tuple[int, int], int]()
    for row in zip(*(columns[name].tolist() for name in names), strict=True):
        round_, node, parent, log_q, found, rank = row
        path[round_, node] = path.get((round_, parent), 0.0) + log_q
        assert found == pytest.approx(path[round_, node], abs=1e-4)
        assert rank == born.setdefault((round_, parent), 0)
        born[round_, parent] += 1
    assert max(path) > min(path)


def check_numbers(
    target: PreTrainedModel, draft: PreTrainedModel, text: list[int], index: int, columns: Columns
) -> None:
    """Where all above a node is the text itself: the numbers against whole forward passes."""
    ids = torch.tensor([text])
    with torch.no_grad():
        at_draft = draft.base_model(ids).last_hidden_state[0]
        at_target = target.base_model(ids).last_hidden_state[0]
        log_q = draft.lm_head(at_draft).log_softmax(-1)
        log_p = target.lm_head(at_target).log_softmax(-1)
    inside = columns["on_path"] & (columns["position"] < len(text))
    assert inside.any()
    race = request_race(SETTINGS[1], index, torch.arange(len(text)), log_q.shape[1])
    assert race is not None
    for row in inside.nonzero()[:, 0].tolist():
        position, token = int(columns["position"][row]), int(columns["token"][row])
        own = log_q[position - 1]
        near = {"rtol": 1e-3, "atol": 1e-3}
        torch.testing.assert_close(columns["log_q"][row], own[token], **near)
        torch.testing.assert_close(columns["log_p"][row], log_p[position - 1, token], **near)
        entropy = -(own.exp() * own).sum()
        torch.testing.assert_close(columns["entropy"][row], entropy, **near)
        scores = own - race[position]
        best = scores.topk(2).values
        lead = scores[token] - (best[1] if scores[token] >= best[0] else best[0])
        torch.testing.assert_close(columns["lead"][row], lead, **near)
        assert int((scores > scores[token]).sum()) == int(columns["rank"][row])
        assert close(columns["draft_state"][row], at_draft[position - 1])
        if text[position] == token:
            assert close(columns["target_state"][row], at_target[position])


def close(stored: Tensor, state: Tensor) -> bool:
    """As far as bf16 goes."""
    return bool((stored.float() - state).abs().max() <= 0.01 * state.abs().max())


def test_leviathan_is_recorded_by_its_own_draws(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    found, done = recorded(tiny_target, tiny_draft, tiny_tokenizer, K=3, rule="leviathan")
    for completion in done:
        columns, counters = found[completion.index], completion.counters
        certain = columns["log_p"] >= columns["log_q"]
        assert columns["kept"][certain].all()
        kept = int((columns["kept"] & columns["on_path"]).sum())
        assert counters.emitted - counters.rounds <= kept <= counters.emitted - counters.rounds + 3


def test_what_cant_be_recorded_is_refused(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    drafter, recorder = LMDrafter(tiny_target, len(tiny_tokenizer)), Recorder(lambda *_: None)
    for how in ({"tree": "dynamic:3,2,6"}, {"rule": "block"}):
        with pytest.raises(ValueError, match="recording: got"):
            Decoder(tiny_target, tiny_tokenizer, drafter, recorder, **how)
    with pytest.raises(ValueError, match="expected a drafter"):
        Decoder(tiny_target, tiny_tokenizer, None, recorder)
