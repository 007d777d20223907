"""What a draft with tokens of its own learns from requests in the target's.

Shapes as in train/live/respelled.py.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_tokens import bytes_alone
from served_requests import PROMPTS, folder_of, lessons, serve, whole
from tiny_llama import build_llama
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.serve.versions import Versions
from draftsmith.decode.untrained.foreign import OmniDrafter
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.ngram_cache import NgramCache
from draftsmith.models.vocab_map import Spelling
from draftsmith.train import online
from draftsmith.train.live.batches import ServedBatch, listed_rows
from draftsmith.train.live.learner import open_learner
from draftsmith.train.live.respelled import Hybrid, RespelledBatch, respelled

FOREIGN = build_llama(258, layers=1, hidden=32, seed=9)


@pytest.fixture(scope="module")
def batch(tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast) -> ServedBatch:
    """Three requests with the 24 likeliest of 320 tokens."""
    drafter = OmniDrafter(FOREIGN, bytes_alone(), tiny_tokenizer)
    found = serve(Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=4), PROMPTS[:3], k=24)
    made = whole([found[i] for i in range(3)])
    assert isinstance(made, ServedBatch)
    return made


@pytest.fixture(scope="module")
def cache(tiny_tokenizer: PreTrainedTokenizerFast) -> NgramCache:
    return NgramCache(Spelling(bytes_alone()), Spelling(tiny_tokenizer), len(tiny_tokenizer))


def walked(
    batch: ServedBatch, made: RespelledBatch, cache: NgramCache
) -> Iterator[tuple[int, int, int, int, list[int]]]:
    """Row, place of a trained token, the place in the draft's tokens where it is foretold, it, and
    its n-gram.
    """
    assert batch.places is not None
    for row, ids_T in enumerate(batch.input_ids):
        at = 0
        for place, token in enumerate(ids_T[batch.places[row] >= 0].tolist()):
            gram = cache.spelled([token])[0][0]
            assert made.input_ids[row, at : at + len(gram)].tolist() == gram
            if place and batch.loss_mask[row, place - 1]:
                yield row, place, at - 1, token, gram
            at += len(gram)


def test_a_batch_is_the_same_text_and_the_laws_stand_where_a_token_begins(
    batch: ServedBatch, cache: NgramCache
) -> None:
    """By dictionaries, token by token."""
    made, listed = respelled(batch, cache), listed_rows(batch)
    mask_BS, ngram_BS = torch.zeros_like(made.loss_mask), torch.zeros_like(made.ngram_BS)
    several = 0
    for row, place, at, _, gram in walked(batch, made, cache):
        if len(gram) > 1:
            ngram_BS[row, at + 1 : at + len(gram)] = 1
            several += 1
        n = row * batch.input_ids.shape[1] + place - 1
        said = zip(listed.ids_NJ[n].tolist(), listed.log_p_NB[n].exp().tolist(), strict=False)
        p = Counter[int]()
        for t, mass in said:
            p[cache.spelled([t])[0][0][0]] += mass
        mask_BS[row, at] = True
        rest = float(listed.log_p_NB[n, -1].exp())
        total = sum(p.values()) + rest
        assert made.listed is not None
        m = row * made.input_ids.shape[1] + at
        ids_J, p_B = made.listed.ids_NJ[m].tolist(), made.listed.log_p_NB[m].exp().tolist()
        found = {i: mass for i, mass in zip(ids_J, p_B, strict=False) if mass > 0}
        assert found == pytest.approx({i: mass / total for i, mass in p.items() if mass}, abs=1e-6)
        assert p_B[-1] == pytest.approx(rest / total, abs=1e-6)
    assert several > 3 and mask_BS.sum() > 10
    assert made.loss_mask.equal(mask_BS) and made.ngram_BS.equal(ngram_BS)


def test_the_loss_is_both_parts(
    batch: ServedBatch,
    cache: NgramCache,
    tmp_path: Path,
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """By a pass of transformers' own."""
    own, made = bytes_alone(), respelled(batch, cache)
    folder = folder_of(tmp_path / "draft", "lm", FOREIGN, tiny_target, own)
    mark = fingerprint(tiny_target, own)
    losses = {}
    for ngram in (0.0, 0.2):
        how = lessons(name="fkl")
        learner = open_learner(folder, how, tiny_target, tiny_tokenizer, mark, cache)
        assert isinstance(learner.objective, Hybrid)
        learner.objective.ngram = ngram
        losses[ngram] = learner.objective(made).loss
    logits_BSD = FOREIGN(made.input_ids).logits.detach().log_softmax(-1)
    nll = kl = 0.0
    for row, _, at, _, gram in walked(batch, made, cache):
        if len(gram) > 1:
            nll -= sum(float(logits_BSD[row, at + j, d]) for j, d in enumerate(gram) if j)
        if not made.loss_mask[row, at]:
            continue
        q_D = logits_BSD[row, at]
        assert made.listed is not None
        m = row * made.input_ids.shape[1] + at
        ids_J, p_B = made.listed.ids_NJ[m], made.listed.log_p_NB[m].exp()
        ids = [int(i) for i, mass in zip(ids_J, p_B, strict=False) if mass > 0]
        q = [*q_D[ids].exp().tolist(), 1 - float(q_D[ids].exp().sum())]
        p = [float(mass) for mass in p_B[:-1] if mass > 0] + [float(p_B[-1])]
        kl += sum(a * (torch.tensor(a / b).log().item()) for a, b in zip(p, q, strict=True) if a)
    assert float(losses[0.0]) == pytest.approx(kl, rel=1e-3)
    assert float(losses[0.2] - losses[0.0]) == pytest.approx(0.2 * nll, rel=1e-3)
    losses[0.2].backward()


def test_a_draft_of_another_tokenizer_learns_while_it_serves(
    tmp_path: Path, tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """A replay: versions are published and swapped in, alpha rises, and no answer changes."""
    target, own, draft = tmp_path / "target", bytes_alone(), tmp_path / "draft"
    for folder, model, tokens in ((target, tiny_target, tiny_tokenizer), (draft, FOREIGN, own)):
        model.save_pretrained(folder)
        tokens.save_pretrained(folder)
    asked = [json.dumps({"prompt": f"{i} plus {i} is", "topic": "sums"}) for i in range(64)]
    (tmp_path / "asked.jsonl").write_text("\n".join(asked))
    out = tmp_path / "run"
    said = f"target.path={target} drafter=omni+{draft} out={out} seed=1 steps=1 dtype=float32 "
    said += f"replay={tmp_path}/asked.jsonl duty=1 replay.max_new_tokens=24 eval_every=4 lr=0.01 "
    said += "mix.requests_per_step=4 publish.heldout_least=3 idle_priority=false save_every=0"
    online.main(said.split())
    lines = [json.loads(line) for line in (out / "stream.jsonl").read_text().splitlines()]
    last: dict[str, Any] = {
        arm: sum(line["alpha"][arm] for line in lines[-16:]) for arm in ("frozen", "online")
    }
    assert last["online"] > last["frozen"] + 0.02 * 16
    assert {line["version"] for line in lines} > {0, 1}
    result = json.loads((out / "done.json").read_text())["result"]
    assert result == f"omni+{Versions(out / 'online/default').current()[1]}"
    plain = Decoder.from_pretrained(str(target), dtype="float32")
    learned = Decoder.from_pretrained(str(target), result, dtype="float32")
    asked_again = ["9 plus 9 is"], SamplingParams(max_new_tokens=24)
    assert plain.generate(*asked_again)[0].tokens == learned.generate(*asked_again)[0].tokens
