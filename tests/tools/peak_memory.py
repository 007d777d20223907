"""Models whose logits dwarf the rest, and what a call holds at most."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
)

from draftsmith.decode.sampling import SamplingParams

LARGE = 32_000  # a vocabulary whose logits dwarf everything else in a small model

GREEDY, SAMPLED = SamplingParams(ignore_eos=True), SamplingParams(1.0, ignore_eos=True)


def config(vocab: int, layers: int) -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )


def model(vocab: int, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(layers)
    return LlamaForCausalLM(config(vocab, layers)).eval().requires_grad_(False)


def peak(call: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """The most bytes that the call's tensors, and torch's own workspaces, hold at one time, beyond
    what is allocated before it: by every allocation that torch's profiler sees, or CUDA's counter.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    news = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    live = most = 0
    for _, change in news:
        live += change
        most = max(most, live)
    return most
