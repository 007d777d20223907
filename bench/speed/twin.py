"""A costly twin: a model that computes what a small one does, at the cost of a large one.

    python bench/speed/twin.py target=../shared/models/target-15m out=runs/twin \\
        drafter=runs/eagle3/gsm8k/drafter,runs/block/gsm8k/drafter

States are padded with zeros (norm weights times sqrt(h / H), epsilon times h / H, so that an RMS
norm is the same), heads and neurons are added that give nothing, and after each layer stand layers
that add nothing. Weights that only zeros meet are noise: of zeros OpenVINO stores equal layers once
and reads a third of the memory. So acceptance is real, and a step costs what the large shape costs:
a processor shows the speed-ups of a real pair, a GPU an 8B's without a download. A trained head is
widened likewise, its taps counted in the twin's layers; a draft LM stays as small as it is.
Each result is compared with what it was made from before it is kept. What is measured on a twin has
to say so. Writes out/target and out/<drafter>, with the twin's fingerprint.

Shapes: h, H hidden sizes of the small model and of the twin.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftsmith.command import parse, run_command
from draftsmith.decode.drafters.load import drafter_of
from draftsmith.decode.drafting.base import Drafter
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import open_drafter, save_drafter
from draftsmith.models.heads.block import TwoTap
from draftsmith.models.heads.eagle import tap_fields
from draftsmith.models.heads.head import Head
from draftsmith.models.taps import NORM, target_states
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.models.tokenizer import vocab_size

ROTARY = ("inv_freq", "original_inv_freq")
NOISE = 0.02  # standard deviation of weights that only zeros meet
TEXT, CLOSE = 48, 1e-4  # tokens that both are compared on; largest difference of logits


@dataclass
class Twin:
    target: str
    out: str
    hidden: int = 1536
    layers: int = 16
    intermediate: int = 5120
    drafter: str = ""  # of the target: heads, widened too, and draft LMs, comma between

    def times(self, config: Any) -> int:
        """The twin's layers for each of the small one's."""
        return int(self.layers // config.num_hidden_layers)


@dataclass(frozen=True)
class Shape:
    """How states widen."""

    h: int
    H: int

    def fill(self, small: nn.Module, large: nn.Module) -> None:
        """The large module's own tensors from the small one's; norms are scaled."""
        scale = (self.h / self.H) ** 0.5 if "Norm" in type(small).__name__ else 1.0
        theirs = dict(small.named_parameters(recurse=False)) | dict(
            small.named_buffers(recurse=False)
        )
        ours = dict(large.named_parameters(recurse=False)) | dict(
            large.named_buffers(recurse=False)
        )
        for name, tensor in theirs.items():
            if name in ours and name not in ROTARY:
                wide = self.padded(tensor, ours[name])
                ours[name].copy_(wide * scale if tensor.shape != wide.shape else wide)

    def padded(self, small: Tensor, large: Tensor) -> Tensor:
        """The small tensor in the place of the large one's first entries, zeros elsewhere; of an
        axis of several states side by side, and what is none after them, each in its own place.
        """
        places = []
        for of, to in zip(small.shape, large.shape, strict=True):
            place_P, (many, rest) = torch.arange(of), divmod(of, self.h)
            if many * self.H + rest == to:
                place_P += place_P // self.h * (self.H - self.h)
            places.append(place_P)
        made = torch.zeros_like(large)
        made[torch.meshgrid(*places, indexing="ij")] = small.to(made.dtype)
        return made


def main(argv: list[str]) -> None:
    settings = parse(Twin, argv)
    saved, tokenizer = load_target(TargetSpec(settings.target), "cpu")
    dtype, small = saved.dtype, saved.float()
    sizes = small.config
    if settings.hidden % sizes.hidden_size or settings.layers % sizes.num_hidden_layers:
        raise ValueError(
            f"got hidden={settings.hidden}, layers={settings.layers}, expected whole multiples of "
            f"the target's {sizes.hidden_size} and {sizes.num_hidden_layers}"
        )
    large = widened_target(small, settings)
    ids_BT = torch.arange(2 * TEXT).view(2, -1) * 97 % vocab_size(tokenizer)
    with torch.inference_mode():
        compare("target", small(ids_BT).logits, large(ids_BT).logits)
    out = Path(settings.out)
    for name in filter(None, settings.drafter.split(",")):
        folder = open_drafter(name, fingerprint(saved, tokenizer), target_config=sizes)
        defaults = folder.meta["defaults"]
        if folder.kind == "lm":
            wide = folder.model()
        else:
            head = folder.head().requires_grad_(False)
            kept = next(head.parameters()).dtype
            wide = widened_head(head.float(), small, large)
            vocab = vocab_size(tokenizer)
            compare(name, drafted(head, small, ids_BT, vocab), drafted(wide, large, ids_BT, vocab))
            wide.to(kept)
            more = settings.hidden // sizes.hidden_size
            defaults = defaults | {"preview": defaults["preview"] and more * defaults["preview"]}
        save_drafter(
            out / Path(name).parent.name,
            kind=folder.kind,
            model=wide,
            tokenizer=tokenizer,
            target_fingerprint=fingerprint(large, tokenizer),
            provenance=(folder.meta["provenance"] or {}) | {"twin_of": name},
            defaults=defaults,
        )
    shutil.rmtree(out / "target", ignore_errors=True)
    large.to(dtype).save_pretrained(out / "target")
    tokenizer.save_pretrained(out / "target")
    counts = [sum(p.numel() for p in model.parameters()) / 1e6 for model in (small, large)]
    print(f"{out / 'target'}: {counts[1]:.0f}M parameters that compute what {counts[0]:.0f}M do")


def widened_target(small: PreTrainedModel, settings: Twin) -> PreTrainedModel:
    """The twin of a Llama-like model, in fp32: each layer is followed by others without effect."""
    config, shape = small.config, Shape(small.config.hidden_size, settings.hidden)
    wide, times = AutoConfig.from_pretrained(settings.target), settings.times(config)
    for name, value in larger(config, settings).items():
        setattr(wide, name, value)
    if getattr(config, "layer_types", None):
        wide.layer_types = [
            kind for kind in config.layer_types for _ in range(settings.times(config))
        ]
    large = AutoModelForCausalLM.from_config(wide, dtype=torch.float32).eval().requires_grad_(False)
    for parameter in large.parameters():
        parameter.zero_()
    read = {}  # of a linear layer: which of its inputs the small model has
    for name, part in small.named_modules():
        steps = name.split(".")
        if "layers" in steps[:-1]:
            at = steps.index("layers") + 1
            steps[at] = str(int(steps[at]) * times)
        if name and steps[-1] != "layers":
            shape.fill(part, large.get_submodule(".".join(steps)))
        if isinstance(part, nn.Linear):
            wide_I = torch.zeros(large.get_submodule(".".join(steps)).in_features)
            read[".".join(steps)] = shape.padded(torch.ones(part.in_features), wide_I).bool()
    noise = torch.Generator().manual_seed(0)
    for name, part in large.named_modules():
        if isinstance(part, nn.Linear) and ".layers." in name:
            # The norms of added layers are zero, and so is all that they read.
            noise_OI = torch.randn(part.weight.shape, generator=noise) * NOISE
            part.weight.copy_(
                noise_OI if name not in read else part.weight.where(read[name], noise_OI)
            )
    large.tie_weights()
    return large


def larger(config: Any, settings: Twin) -> dict[str, Any]:
    """What of a config grows: heads as the states do."""
    more = settings.hidden // config.hidden_size
    return {
        "hidden_size": settings.hidden,
        "intermediate_size": settings.intermediate,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": config.num_attention_heads * more,
        "num_key_value_heads": config.num_key_value_heads * more,
        "rms_norm_eps": config.rms_norm_eps / more,
    }


def widened_head(head: Head, small: PreTrainedModel, large: PreTrainedModel) -> Head:
    """The head of the twin; as wide within as the twin's layers where it was as the target's."""
    about, wide = head.to_json(), large.config
    shape = Shape(small.config.hidden_size, wide.hidden_size)
    times = wide.num_hidden_layers // small.config.num_hidden_layers
    if about.get("narrow") and about["intermediate_size"] == small.config.intermediate_size:
        about["narrow"] = about["narrow"] * wide.intermediate_size // small.config.intermediate_size
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if about.get(name) == getattr(small.config, name):
            about[name] = getattr(wide, name)
    if "rms_norm_eps" in about:
        about["rms_norm_eps"] = about["rms_norm_eps"] * shape.h / shape.H
    taps = tuple(tap if tap == NORM else tap * times for tap in head.taps)
    changed = {"taps": list(taps), "tap": taps[0], "target_hidden_size": wide.hidden_size}
    changed |= {} if NORM in taps else tap_fields(taps)
    about |= {name: value for name, value in changed.items() if name in about}
    made = type(head).from_json(about).eval().requires_grad_(False)
    parts = [(part, made.get_submodule(name)) for name, part in head.named_modules()]
    for part, wide_part in parts:
        shape.fill(part, wide_part)
    for part, wide_part in parts:
        if isinstance(part, TwoTap):  # its map has groups of numbers for each of two tokens
            both = (one.delta.weight for one in (part, wide_part))
            small_2GH, wide_2GH = (weight.unflatten(0, (2, -1)) for weight in both)
            wide_2GH.copy_(shape.padded(small_2GH, wide_2GH))
    return made


def drafted(head: Head, target: PreTrainedModel, ids_BT: Tensor, vocab: int) -> Tensor:
    """What it drafts first after each token of a text."""
    with torch.inference_mode():
        taps_BTU = target_states(target, head.taps, input_ids=ids_BT).taps_BTF
        drafter: Drafter = drafter_of(head, target, vocab)
        logits_BTV = drafter.teacher_logits(ids_BT, taps_BTU)
    assert logits_BTV is not None, f"a {head.kind} head has a law"
    return logits_BTV


def compare(name: str, small: Tensor, large: Tensor) -> None:
    """Say how far apart they are; ValueError where that isn't rounding."""
    small, large = (x.masked_fill(x.isneginf(), 0) for x in (small, large))  # not drafted
    apart = float((small - large).abs().max())
    print(f"{name}: logits differ by {apart:.1e} at most" if apart else f"{name}: logits equal")
    if not apart <= CLOSE * float(small.abs().max()):
        raise ValueError(
            f"{name}: got logits that differ by {apart:.2g}, expected the same: it can't be widened"
        )


if __name__ == "__main__":
    run_command(main, Twin)
