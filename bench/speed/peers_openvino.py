"""OpenVINO GenAI as arms of peers.py: pipelines in an environment of their own, told by lines.

    .peers/openvino/bin/python bench/speed/peers_openvino.py TARGET DRAFT THREADS PRECISION

TARGET, DRAFT: folders of exported models. A line in names a pipeline (of ARMS), the prompt's token
ids, how many tokens to write, and K; a line out has the answer's tokens and, of its decoding alone
(after the prefill and its token), seconds, tokens, passes of the target and of the draft. Greedy;
the KV is kept in the precision of the models (by itself it would be 8 bits wide).
"""

import json
import os
import sys
from typing import Any

ARMS = {"plain": "PA", "plain, SDPA": "SDPA", "speculative": "PA", "lookup": "PA"}
NGRAM = 3  # tokens of a prompt lookup's n-gram


def answer(genai: Any, pipe: Any, tensor: Any, new_tokens: int, K: int, arm: str) -> dict[str, Any]:
    asked = genai.GenerationConfig()
    asked.max_new_tokens, asked.ignore_eos, asked.do_sample = new_tokens, True, False
    asked.apply_chat_template = False
    if not arm.startswith("plain"):
        asked.num_assistant_tokens = K
    if arm == "lookup":
        asked.max_ngram_size = NGRAM
    done = pipe.generate(tensor, asked)
    told, first = done.perf_metrics, 1
    seconds = (told.get_generate_duration().mean - told.get_ttft().mean) / 1000
    passes = list(told.raw_metrics.m_batch_sizes)
    more = {"counted": len(done.tokens[0]) - passes[0], "rounds": len(passes) - first}
    if arm == "speculative":
        more["accepted"] = done.extended_perf_metrics.get_num_accepted_tokens()
        more["drafted"] = done.extended_perf_metrics.get_num_draft_tokens()
    return {"tokens": list(done.tokens[0]), "seconds": seconds, **more}


def main() -> None:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    target, draft, threads, precision = sys.argv[1:]
    how = {"INFERENCE_NUM_THREADS": int(threads), "INFERENCE_PRECISION_HINT": precision}
    how["KV_CACHE_PRECISION"] = precision
    beside = {
        "speculative": lambda: {"draft_model": genai.draft_model(draft, "CPU", **how)},
        "lookup": lambda: {"prompt_lookup": True},
    }
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print isn't an answer
    pipes: dict[str, Any] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        arm = asked["arm"]
        if arm not in pipes:
            more = beside.get(arm, dict)()
            pipes[arm] = genai.LLMPipeline(
                target, "CPU", ATTENTION_BACKEND=ARMS[arm], **how, **more
            )
        tensor = ov.Tensor(np.array([asked["ids"]], dtype=np.int64))
        told = answer(genai, pipes[arm], tensor, asked["new_tokens"], asked["K"], arm)
        print(json.dumps(told), file=lines, flush=True)


if __name__ == "__main__":
    main()
