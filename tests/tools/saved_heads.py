"""Drafters that are saved, loaded again, and measured."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import Text

from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.forward.kv import KVPool
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import save_drafter

Pair = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def reloaded(pair: Pair, drafter: Any, folder: Path) -> Any:
    """The drafter from its folder: of the same class, shape, weights and bytes a draft call."""
    save_drafter(
        folder / "drafter",
        kind=drafter.head.kind,
        model=drafter.head,
        tokenizer=pair[1],
        target_fingerprint=fingerprint(*pair),
        provenance={},
        defaults={"K": 3},
    )
    loaded: Any = load_drafter(str(folder / "drafter"), *pair)
    assert type(loaded) is type(drafter)
    assert loaded.head.to_json() == drafter.head.to_json()
    for name, tensor in drafter.head.state_dict().items():
        assert torch.equal(loaded.head.state_dict()[name], tensor), name
    assert loaded.parameter_bytes == drafter.parameter_bytes > 0
    return loaded


def keeps_its_size(
    pair: Pair, drafter: Any, pool: str, texts: list[Text], params: SamplingParams
) -> None:
    """A drafter's pool is as large as planned, and that however long answers become."""
    found = set()
    for new in (4, 300):
        decoder = Decoder(*pair, drafter, K=3, batch_size=2)
        decoder.generate(texts, replace(params, max_new_tokens=new))
        held: KVPool = getattr(drafter, pool)
        assert decoder.memory is not None
        assert held.kv_2LBSHE.nbytes == decoder.memory.drafter_kv
        found.add(decoder.memory.drafter_kv)
    assert len(found) == 1
