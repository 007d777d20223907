"""Plain autoregressive decoding, slow and obvious: what every other path must equal.

One sequence at a time, transformers' own cache, its own forward; nothing shared with the engine but
the transform and the noise.
"""

import inspect

import torch
from transformers import DynamicCache, PreTrainedModel

from draftsmith.decode.sampling import SamplingParams, choose, request_race


@torch.inference_mode()
def plain_decode(
    model: PreTrainedModel,
    prompt: list[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    stop_ids: tuple[int, ...],
    index: int = 0,
) -> list[int]:
    """The tokens that follow `prompt`, a stop token included; index: the prompt's global number."""
    cache = DynamicCache(config=model.config)
    named = (
        "cache_params" in inspect.signature(model.forward).parameters
    )  # models without attention
    held = {"cache_params" if named else "past_key_values": cache}
    fed = list(prompt)
    tokens: list[int] = []
    while len(tokens) < params.max_new_tokens:
        at = len(prompt) + len(tokens) - len(fed)  # said, as some models begin at 0 again
        at_1N = torch.arange(at, at + len(fed), device=model.device)[None]
        ids_1N = torch.tensor([fed], device=model.device)
        out = model(ids_1N, position_ids=at_1N, use_cache=True, **held)
        logits_V = params.transform(out.logits[0, -1, :vocab_size])
        position_1 = torch.tensor([len(prompt) + len(tokens)], device=model.device)
        race_1V = request_race(params, index, position_1, vocab_size)
        tokens.append(int(choose(logits_V, None if race_1V is None else race_1V[0])))
        if tokens[-1] in stop_ids:
            break
        fed = tokens[-1:]
    return tokens
