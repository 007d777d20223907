"""The frozen target of a run: whole on every process, or its decoder layers shared out.

Shared out, each process keeps its part of every layer (torch's `fully_shard`), and a pass gathers
one layer after another. Embeddings, the last norm and the LM head stay whole: losses and heads read
their rows apart from any pass.

Every pass is then one of all processes. A training step has as many on each; what differs from one
to the next (decoding, filling a cache) happens inside `in_company`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.prompts.chat import set_template
from draftsmith.models.fingerprint import remember_body
from draftsmith.models.taps import decoder_layers
from draftsmith.models.target import load_target, output_head
from draftsmith.train.run.loop import Evaluate
from draftsmith.train.run.settings import setting


def open_target(
    config: Any, accelerator: Accelerator
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target of a recipe that has `shard_target`, and its tokenizer, whose chats are rendered
    as `text` says, where this process computes. All call it together. ValueError for what
    `load_target`, `set_template` and `check_shards` refuse.
    """
    check_shards(config, accelerator.num_processes)
    check_frozen(config)
    # Whole in the host's memory alone if cut: the device sees one whole layer at a time.
    place = "cpu" if config.shard_target else accelerator.device
    target, tokenizer = load_target(config.target.resolved(config.dtype), place)
    set_template(tokenizer, config.text.thinking, config.text.template_kwargs)
    if config.shard_target:
        share_out(target, accelerator.device)
    return target, tokenizer


def check_shards(config: Any, processes: int) -> None:
    """ValueError for a recipe whose run can't do with a shared target."""
    shared = setting(config, "shard_target")
    if shared and processes == 1:
        raise ValueError(
            "got shard_target=true and one process, expected several to share the target's layers: "
            "launch with --num_processes, or say shard_target=false"
        )
    weight, alone = setting(config, "head.weight"), "one process, which can't run the target alone"
    for key, why in (
        ("joint.enabled", "joint=true, which trains the target too"),
        ("head.weight", f"head.weight={weight}, whose head is calibrated by {alone}"),
    ):
        if shared and setting(config, key):
            raise ValueError(f"got shard_target=true and {why}: say shard_target=false")


def check_frozen(config: Any) -> None:
    """ValueError for a recipe that needs of its target what it says not to keep: its layers, where
    they wait elsewhere, or exact weights, where they are quantised.
    """
    steps = ("shard_target", "on_policy.share", "head.weight", "joint.enabled")
    exact = ("shard_target", "joint.enabled")
    for key, needs in (("cache.offload_target", steps), ("target.quantise", exact)):
        said = setting(config, key)
        wrong = [f"{name}={value}" for name in needs if (value := setting(config, name))]
        if key == "target.quantise" and setting(config, "draft.init") == "target":
            wrong.append("draft.init=target")
        if key == "cache.offload_target" and said and not config.cache.path:
            wrong.append("no cache.path")
        if said and wrong:
            raise ValueError(f"got {key}={said} with {', '.join(wrong)}: leave one of them out")


def offloaded(config: Any, target: PreTrainedModel, evaluate: Evaluate) -> Evaluate:
    """With `cache.offload_target` the target's decoder layers wait in the host's memory from now
    on, and come back while `evaluate` runs. Embeddings and LM head stay: steps read their rows.
    """
    if not config.cache.offload_target:
        return evaluate
    device, layers = target.device, nn.ModuleList(decoder_layers(target)).to("cpu")

    def brought_back() -> dict[str, float]:
        layers.to(device)
        try:
            return evaluate()
        finally:
            layers.to("cpu")

    return brought_back


def share_out(target: PreTrainedModel, device: torch.device) -> None:
    """Cut each decoder layer of a target into a part a process, and move this one's to `device`.
    ValueError where the layers can't be told.
    """
    layers, body = decoder_layers(target), output_head(target)[0]
    remember_body(target)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    outside = set(body.parameters()) - inside
    # Holds nothing itself: as the root of all it lets one layer run while the next is gathered.
    fully_shard(body, mesh=mesh, reshard_after_forward=True, ignored_params=outside)
    target.to(device)  # type: ignore[arg-type]
    body.register_forward_hook(_forget_order)
    # What is gathered first in inference mode could never be written outside of it.
    _one_pass(body)


def in_parts(target: PreTrainedModel) -> bool:
    return isinstance(output_head(target)[0], FSDPModule)


@contextmanager
def in_company(target: PreTrainedModel) -> Iterator[None]:
    """Inside, each process may run the target as often as it likes, or not at all: who is done
    joins the others' passes until all are done.
    """
    if not in_parts(target):
        yield
        return
    body, device = output_head(target)[0], target.device

    def others_run(mine: bool) -> torch.Tensor:
        running = torch.tensor(int(mine), device=device)
        distributed.all_reduce(running)
        return running

    hook = body.register_forward_pre_hook(lambda *_: others_run(True) and None, prepend=True)
    try:
        yield
    finally:
        hook.remove()
    while others_run(False):
        _one_pass(body)


@torch.no_grad()
def _one_pass(body: nn.Module) -> None:
    """Take part in a pass of all processes, with nothing of one's own to run."""
    device = next(body.parameters()).device
    body(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)


def _forget_order(body: Any, *_: Any) -> None:
    """torch notes the order of all passes until a backward comes, which here never does."""
    order = body._get_fsdp_state()._comm_ctx.post_forward_order
    for group in order:
        group._post_forward_indices.clear()
    order.clear()
