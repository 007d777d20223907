"""Requests as a server keeps them, made by tiny models, for the tests of what learns from them."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafters.eagle import EagleDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.recorder import Harvested
from draftsmith.decode.engine.request import Request, open_request
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.serve.buffer import Served, as_served
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import save_drafter
from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.target import vocab_size
from draftsmith.train.drafts.start import EagleSource, open_head
from draftsmith.train.live.batches import as_batch
from draftsmith.train.live.learner import Lessons
from draftsmith.train.objectives.distillation import Losses
from draftsmith.train.objectives.eagle import Unroll


def lessons(kind: str = "lm", **loss: Any) -> Lessons:
    return Lessons("", kind, Losses(**{"name": "jsd"} | loss), Unroll(steps=4))


PROMPTS = [f"What is {i} and {i * i}?" for i in range(24)]


def fresh_head(target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Eagle:
    return open_head(EagleSource(), target, tokenizer, torch.ones(len(tokenizer)), seed=3)


def serve(
    decoder: Decoder, prompts: list[str], *, k: int = 8, version: int = 0
) -> dict[int, Served]:
    """What a server keeps of some prompts, by their index."""
    found: dict[int, Served] = {}

    def finished(request: Request, harvested: Harvested | None) -> None:
        assert harvested is not None
        states = bool(decoder.runner.taps)
        made = as_served(request, harvested, decoder.runner, k=k, version=version, states=states)
        assert made is not None
        found[request.completion.index] = made

    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    session = decoder.open_session(4, 64, finished=finished, harvest=True)
    for i, prompt in enumerate(prompts):
        made = {"tokenizer": decoder.tokenizer, "params": params, "context": 64}
        session.submit(open_request(prompt, i, i, **made))
    while session.busy:
        session.step()
    session.close()
    return found


def serve_by_lm(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> dict[int, Served]:
    drafter = LMDrafter(draft, vocab_size(tokenizer))
    return serve(Decoder(target, tokenizer, drafter, batch_size=4), PROMPTS)


def serve_by_head(
    target: PreTrainedModel, head: Eagle, tokenizer: PreTrainedTokenizerFast
) -> dict[int, Served]:
    drafter = EagleDrafter(head, target, vocab_size(tokenizer))
    return serve(Decoder(target, tokenizer, drafter, batch_size=4), PROMPTS[:6])


def whole(requests: list[Served], **more: Any) -> Any:
    return as_batch(requests, range(len(requests)), **{"pad_id": 1, "max_length": 64} | more)


def folder_of(
    path: Path, kind: str, model: Any, target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> Path:
    save_drafter(
        path,
        kind=kind,
        model=model,
        tokenizer=tokenizer,
        target_fingerprint=fingerprint(target, tokenizer),
        provenance={},
        defaults={},
    )
    return path
