"""Run by test_followers.py: decodes with a target that is split over processes.

split_job.py FOLDER PARTS [commit | stay]      FOLDER has target and drafters, then FOLDER/told
"""

import gc
import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from draftsmith.decode.drafters.load import load_decoded, load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.parallel import followers
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.target import TargetSpec

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a chain of an LM": {"drafter": "lm", "K": 3},
    "a dynamic tree of EAGLE": {"drafter": "eagle", "tree": "dynamic:3,2,7"},
    "parts of EAGLE's chains": {"drafter": "eagle", "K": 3, "policy": "budget"},
    "a static tree": {"drafter": "eagle", "tree": "eagle-25"},
    "split attention": {"drafter": "lm", "K": 3, "attention": "split"},
    "what rests": {"drafter": "lm", "K": 3, "policy": "auto"},
}
PROMPTS = [[5, 6, 7, 8, 9], [40, 41], [17, 18, 19], [70, 5, 70, 5, 70], [33]]


def decoded(folder: Path, parts: int, only: str = "") -> dict[str, Any]:
    """Answers by way and temperature, of batches of two whose rows come and go. only: of ways with
    this word.
    """
    spec = TargetSpec(str(folder / "target"), dtype="float32", parallel=parts)
    target, tokenizer = load_decoded(spec, "cpu")
    answers: dict[str, Any] = {}
    for way, how in ((way, how) for way, how in WAYS.items() if only in way):
        drafter = load_drafter(str(folder / how["drafter"]), target, tokenizer) if how else None
        options = {name: value for name, value in how.items() if name != "drafter"}
        decoder = Decoder(target, tokenizer, drafter, batch_size=2, **options)
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature, max_new_tokens=12, ignore_eos=True)
            done = decoder.generate(PROMPTS, params)
            answers[f"{way}, {temperature:g}"] = [made.tokens for made in done]
    found = {"answers": answers, "body": type(decoder.runner.call).__name__}
    found["layers"] = sum(w.nbytes for w in target.base_model.layers.parameters())
    found["kv"] = decoder.runner.pool(1, 64).kv_2LBSHE.nbytes
    ids = torch.tensor([PROMPTS[0]])
    found["logits"] = target(ids, attention_mask=torch.ones_like(ids)).logits.tolist()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, twin = Path(sys.argv[1]), sys.argv[3:]
    if twin == ["commit"]:  # the followers' trees stay where they were drafted
        followers.Mirror.commit = lambda *given: None  # type: ignore[method-assign]
    if twin == ["stay"]:  # until it is killed
        load_decoded(TargetSpec(str(where / "target"), parallel=int(sys.argv[2])), "cpu")
        print("ready", flush=True)
        signal.pause()
    told = decoded(where, int(sys.argv[2]), "tree" if twin else "")
    gc.collect()
    told["unheld"] = len(followers.Leader.gone)
    (where / "told").write_text(json.dumps(told))
