"""How a run is spread over processes, in one place: DDP, DeepSpeed ZeRO-1/2/3, FSDP2.

`spread` wraps an objective and makes its optimizers; the loop and the checkpoints then ask what it
returns, and know nothing of modes. What each process holds (w weights, g gradients, o optimizer):

    replicated   one process, or DDP     all of w, g, o
    zero1        DeepSpeed               w, g and its share of o
    zero2        DeepSpeed               w and its share of g, o
    zero3, fsdp2                         its share of w, g, o

Under the last two, weights are whole only inside a module's `forward`. An objective reads the
output head apart from its module, so the objective itself is such a module: when it is called,
FSDP2 gathers all that lies outside the decoder layers, ZeRO-3 the heads that are declared to it.
"""

import contextlib
import math
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from draftsmith.train.run.optim import optimizers
from draftsmith.train.run.settings import Settings, setting

# launch.py sets it in place of accelerate's own switch, which turns into DDP on a CPU and has
# transformers load empty weights on all processes but the first.
FSDP2_ASKED = "DRAFTSMITH_FSDP2"
SHARDED = ("zero3", "fsdp2")


def mode(accelerator: Accelerator) -> str:
    """replicated, zero1, zero2, zero3 or fsdp2."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    return "fsdp2" if os.environ.get(FSDP2_ASKED) else "replicated"


def check_mode(found: str, settings: Settings) -> None:
    """Raises ValueError for what the recipe asks and the mode `found` can't do."""
    on_policy = setting(settings, "on_policy.share")
    if found in SHARDED and on_policy:
        raise ValueError(
            f"got on_policy.share={on_policy} under {found}, expected 0: each process would "
            "write answers of its own lengths with weights that are whole only while all run the "
            "same layer, and wait forever; use ZeRO-2 or DDP, or answers of train/prepare.py"
        )
    if found.startswith("zero") and settings.optimizer == "muon":
        raise ValueError(
            f"got optimizer=muon under {found}: it needs two optimizers and whole matrices, "
            "DeepSpeed takes one optimizer and cuts them; use adamw or sgd, or DDP or FSDP2"
        )
    lora = setting(settings, "joint.enabled") is not False and setting(settings, "lora.rank")
    if found in SHARDED and lora:
        raise ValueError(
            f"got lora.rank={lora} under {found}, which would cut and save the frozen weights too: "
            "use DDP or ZeRO-2, adapters and their moments are small"
        )
    if found in SHARDED and setting(settings, "method") == "prompts":
        raise ValueError(
            f"got method=prompts under {found}, which would train all embeddings: use DDP or "
            "ZeRO-2, prompts are few"
        )
    if found == "zero3" and settings.compile:
        raise ValueError("got compile=true under zero3, which gathers weights in hooks: use FSDP2")


class Replicated:
    """Every process holds everything; also the way of one process."""

    stepped_in_backward = False
    holds_gradients = True  # whole ones, until the last micro-batch

    def __init__(self, accelerator: Accelerator, objective: nn.Module, settings: Settings) -> None:
        self.accelerator, self.objective, self.settings = accelerator, objective, settings
        # By how much averaging has made the gradient smaller than the sum over the step.
        self.averaged = accelerator.num_processes
        self.wrap()

    def wrap(self) -> None:
        plain = optimizers(self.objective, self.settings)
        self.model, *self.optimizers = self.accelerator.prepare(self.objective, *plain)
        # DDP's prefix of all names stays out of checkpoints, so that one process can read them.
        self.accelerator.register_save_state_pre_hook(_without_prefix)
        self.accelerator.register_load_state_pre_hook(self._unwrapped)

    def __call__(self, batch: Any) -> Any:
        return self.model(batch)

    def micro(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch, the last of its step or not."""
        waits = self.holds_gradients and not last
        return self.accelerator.no_sync(self.model) if waits else contextlib.nullcontext()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.accelerator.backward(loss)

    def clip(self) -> float:
        """Clip the gradient; returns its norm before."""
        limit = self.settings.clip_norm or math.inf
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder))

    def finish(self) -> None:
        """Leave the objective with whole weights, as a plain module to be saved."""

    def _unwrapped(self, models: list[nn.Module], _: str) -> None:
        models[:] = map(self.accelerator.unwrap_model, models)


class Zero(Replicated):
    """DeepSpeed: it accumulates, clips and steps inside of its backward."""

    stepped_in_backward, holds_gradients = True, False

    def wrap(self) -> None:
        super().wrap()
        self.averaged *= self.settings.accumulation
        self.engine: Any = self.accelerator.deepspeed_engine_wrapped
        load_whole()
        if mode(self.accelerator) == "zero3":
            _declare_heads(self.objective)
            _run_as_forward(self.objective, "measure")

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.backward(loss, sync_gradients=last)

    def clip(self) -> float:
        return float(self.engine.get_global_grad_norm())

    def finish(self) -> None:
        if mode(self.accelerator) == "zero3":
            _make_whole(self.objective)


def load_whole() -> None:
    """Have transformers make and load models whole again: told of ZeRO-3, it would cut the frozen
    target and whatever else is loaded.
    """
    unset_hf_deepspeed_config()


class Fsdp2(Replicated):
    """`fully_shard` on each decoder layer, and on the objective for the rest. Weights and their
    gathers are fp32, as under DDP; matrix products run in the autocast type.
    """

    # Each micro-batch's gradient is cut at once: whole ones would be as large as the weights.
    holds_gradients = False

    def wrap(self) -> None:
        accelerator, objective = self.accelerator, self.objective
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        layers = decoder_layers(objective)
        if not layers:
            raise _nothing_to_cut(objective, "fsdp2")
        self._classes = {module: type(module) for module in (*layers, objective)}
        # fully_shard has the modules renew their shares after weights are loaded into them.
        parts = objective.modules()
        self._hooks = {part: OrderedDict(part._load_state_dict_post_hooks) for part in parts}
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(objective, mesh=mesh)
        _run_as_forward(objective, "measure")
        self.model, self.optimizers = objective, optimizers(objective, self.settings)

    def __call__(self, batch: Any) -> Any:
        with self.accelerator.autocast():
            return self.model(batch)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def save(self, folder: Path) -> None:
        weights, states = get_state_dict(self.objective, self.optimizers)
        try:
            dcp.save({"objective": weights, "optimizers": states}, checkpoint_id=folder)
        except dcp.CheckpointException as error:
            raise RuntimeError(str(error)) from error

    def load(self, folder: Path) -> None:
        parts = self.objective, self.optimizers
        weights, states = get_state_dict(*parts)
        # Read into the tensors of both, which are this process's shares.
        dcp.load({"objective": weights, "optimizers": states}, checkpoint_id=folder)
        set_state_dict(*parts, model_state_dict=weights, optim_state_dict=states)

    def finish(self) -> None:
        _make_whole(self.objective)
        for module, kind in self._classes.items():
            module.__class__ = kind
        for module, hooks in self._hooks.items():
            module._load_state_dict_post_hooks = hooks


def spread(accelerator: Accelerator, objective: nn.Module, settings: Settings) -> Replicated:
    """The objective, spread as the launch says, with its optimizers. ValueError for an objective or
    optimizer that the mode can't train.
    """
    if settings.compile:
        for layer in decoder_layers(objective):
            layer.compile()
    kinds: dict[str, type[Replicated]] = {"replicated": Replicated, "fsdp2": Fsdp2}
    return kinds.get(mode(accelerator), Zero)(accelerator, objective, settings)


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The decoder layers of the language models in a module."""
    names = {name for model in _language_models(module) for name in model._no_split_modules or ()}
    return [part for part in module.modules() if type(part).__name__ in names]


def _language_models(module: nn.Module) -> list[PreTrainedModel]:
    models = (part for part in module.modules() if isinstance(part, PreTrainedModel))
    return [model for model in models if model.get_output_embeddings() is not None]


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """`module.state_dict()` with each tensor whole, where the module is cut too. All processes must
    call it together, for they give each other what they have.
    """
    state = module.state_dict(keep_vars=True)
    once = {id(tensor): _whole(tensor) for tensor in {id(t): t for t in state.values()}.values()}
    return {name: once[id(tensor)] for name, tensor in state.items()}


def _whole(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach()
    if hasattr(tensor, "ds_id"):  # of ZeRO-3
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        with GatheredParameters([tensor]):
            return tensor.detach().clone()
    found = tensor.detach()
    # ZeRO-1 and 2 keep all weights in one storage, which safetensors would take for one tensor.
    return found.clone() if found.untyped_storage().nbytes() > found.nbytes else found


def _declare_heads(objective: nn.Module) -> None:
    """Have ZeRO-3 gather output heads in the objective's own forward, where the losses read them.
    ValueError for an objective without one, such as that of heads.
    """
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    models = _language_models(objective)
    if not models:
        raise _nothing_to_cut(objective, "zero3")
    for model in models:
        for parameter in model.get_output_embeddings().parameters():
            register_external_parameter(objective, parameter)


def _nothing_to_cut(objective: nn.Module, mode: str) -> ValueError:
    return ValueError(
        f"got {type(objective).__name__} under {mode}, expected the objective of a draft LM: heads "
        "are small, train them with DDP or ZeRO-2"
    )


def _make_whole(module: nn.Module) -> None:
    """Put whole parameters in the place of cut ones; ties stay ties."""
    made: dict[int, nn.Parameter] = {}
    module.state_dict()  # FSDP2 lets go of what it has gathered
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(_whole(parameter), parameter.requires_grad)
            part._parameters[name] = made[id(parameter)]


def _run_as_forward(module: nn.Module, name: str) -> None:
    """Have a method of the module gather weights as its forward does: it runs in that place."""
    method: Callable[..., Any] | None = getattr(module, name, None)
    if method is None:
        return

    def run(*args: Any, **options: Any) -> Any:
        forward = module.forward
        module.forward = method
        try:
            return module(*args, **options)
        finally:
            module.forward = forward

    setattr(module, name, run)


def _without_prefix(_: list[nn.Module], weights: list[dict[str, Tensor]], __: str) -> None:
    for state in weights:  # in place: accelerate knows its own kind of dict by its type
        for name in list(state):
            state[name.removeprefix("module.")] = state.pop(name)
