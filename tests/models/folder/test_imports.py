"""Heads as other toolkits write them: every tensor is found, and they decode."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_folders import equal_heads, made, on_disk, sizes_of, written
from official_eagle import official_eagle1, official_eagle3
from tiny_llama import build_llama
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.models.folder.drafter_folder import open_drafter
from draftsmith.models.folder.tensors import Checkpoint, outline
from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.heads.head import Head
from draftsmith.models.heads.hydra import Hydra, HydraConfig

Target = LlamaForCausalLM


def nested_ids(folder: Path, head: Head, target: Target) -> Path:
    """ModelOpt's: `layers.0`, only the nested ids, t2d left out."""
    assert isinstance(head, Eagle)
    tensors = {n.replace("midlayer", "layers.0"): t for n, t in head.on_disk().items()}
    del tensors["t2d"]
    config = sizes_of(head) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": 320,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
    }
    return written(folder, config, tensors, "model.safetensors")


def official_medusa(folder: Path, head: Head, target: Target) -> Path:
    """FasterDecoding's; the published configs say 2 heads whatever there are."""
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    return written(folder, config, head.on_disk(), "medusa_lm_head.pt")


def official_hydra(folder: Path, head: Head, target: Target) -> Path:
    """zankner's: one prefix model, a dropout in front of each block where there is one."""
    prefixed = any(name.startswith("prefix_layer") for name in head.on_disk())
    tensors: dict[str, Tensor] = {"input_embed_fn.weight": target.get_input_embeddings().weight}
    for name, tensor in head.on_disk().items():
        name = re.sub("^prefix_layer", "prefix_embeding_layer.layers.0", name)
        name = re.sub("^prefix_norm", "prefix_embeding_layer.norm", name)
        if prefixed:
            name = re.sub(r"^(hydra_lm_head\.\d)", r"\1.1", name)
            block = re.match(r"(hydra_mlp\.\d)\.(\d)(.*)", name)
            name = f"{block[1]}.{2 * int(block[2]) + 1}{block[3]}" if block else name
        tensors[name] = tensor
    if prefixed:
        tensors["prefix_embeding_layer.embed_tokens.weight"] = torch.ones(320, 32)
        tensors["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    config = {
        "hydra_num_heads": 3,
        "hydra_num_layers": 2,
        "hydra_head_arch": "prefix-mlp" if prefixed else "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
    }
    return written(folder, config, tensors, "hydra_lm_head.pt")


# (kind, fields of its config, who writes it)
LAYOUTS: dict[str, tuple[str, dict[str, Any], Callable[[Path, Head, Target], Path]]] = {
    "official eagle3": ("eagle3", {}, official_eagle3),
    "official eagle3, all tokens": ("eagle3", {"draft_vocab": 320}, official_eagle3),
    "nested ids": ("eagle3", {"fc_norm": True}, nested_ids),
    "official eagle1": ("eagle1", {"fc_bias": True}, official_eagle1),
    "eagle1 without bias": ("eagle1", {}, official_eagle1),
    "medusa": ("medusa", {}, official_medusa),
    "medusa on the target's head": ("medusa", {"own_heads": False}, official_medusa),
    "hydra": ("hydra", {"layers": 2, "head_bias": True}, official_hydra),
    "hydra++": ("hydra", {"layers": 2, "head_bias": True, "prefixed": True}, official_hydra),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_arrives_and_it_decodes(
    tmp_path: Path, tiny_target: Target, tiny_tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    kind, about, write = LAYOUTS[name]
    head = made(kind, tiny_target, **about)
    if kind == "hydra" and "prefixed" in about:  # its layer is one of the target's own sizes
        head = hydra_like(tiny_target)
    folder = write(tmp_path / "theirs", head, tiny_target)
    with pytest.warns(UserWarning, match="not known to be made for this target"):
        opened = open_drafter(folder, None, target_config=tiny_target.config)
    assert opened.kind == kind and opened.meta["target"] is None
    equal_heads(opened.head(), head)
    assert {p.dtype for p in opened.head("bfloat16").parameters()} == {torch.bfloat16}
    with pytest.warns(UserWarning, match="not known"):
        drafter = load_drafter(str(folder), tiny_target, tiny_tokenizer)
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, K=2)
    done = decoder.generate(PROMPTS[:2], SETTINGS[0])
    assert [c.tokens for c in done] == truths(tiny_target, tiny_tokenizer, SETTINGS[0])[:2]


def hydra_like(target: Target) -> Head:
    """Hydra++, whose attention has the target's sizes: official folders don't name any."""
    config = type(target.config)(**target.config.to_dict() | {"num_hidden_layers": 1})
    torch.manual_seed(4)
    sizes = {"hidden": 32, "rows": 320, "heads": 3, "layers": 2}
    head = Hydra(HydraConfig(**sizes, prefix=config, head_bias=True)).eval()
    for parameter in head.parameters():
        parameter.data.normal_(std=0.2)
    return head.requires_grad_(False)


def test_rotary_fields_and_layers_of_old(tmp_path: Path, tiny_target: Target) -> None:
    head = made("eagle3", tiny_target)
    scaling = {"type": "linear", "factor": 4.0}
    folder = official_eagle3(tmp_path / "theirs", head, tiny_target, rope_scaling=scaling)
    with pytest.warns(UserWarning, match=r"EAGLE-3's usual ones are taken, \[1, 2\]"):
        opened = open_drafter(folder, None, target_config=tiny_target.config)
    rope = opened.head().config.layer.rope_parameters
    assert (rope["rope_theta"], rope["rope_type"], rope["factor"]) == (50000.0, "linear", 4.0)
    with pytest.raises(
        ValueError, match=r"leaves to its target which layers it reads .*give the target"
    ):
        open_drafter(folder, None)


def test_top_ids_win_and_the_difference_is_said(tmp_path: Path, tiny_target: Target) -> None:
    head = made("eagle3", tiny_target)
    ids = {
        "eagle_aux_hidden_state_layer_ids": [1, 2],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]},
    }
    folder = official_eagle3(tmp_path / "theirs", head, tiny_target, **ids)
    with pytest.warns(UserWarning, match=r"\[1, 2\] is taken, not \[2, 3\]"):
        assert open_drafter(folder, None).head().taps == (1, 2)


def test_sglang_names_of_further_layers(tmp_path: Path, tiny_target: Target) -> None:
    head = made("eagle3", tiny_target, layers=2)
    assert isinstance(head, Eagle)
    tensors = {
        name.replace("layers.1.input_layernorm", "layers.1.hidden_norm"): tensor
        for name, tensor in head.on_disk().items()
    }
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2]}
    folder = written(tmp_path / "t", sizes_of(head) | ids, tensors, "model.safetensors")
    with pytest.warns(UserWarning):
        equal_heads(open_drafter(folder, None).head(), head)


def test_another_target_is_refused(
    tmp_path: Path, tiny_target: Target, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3]}
    head = made("eagle3", tiny_target, taps=(1, 3))
    folder = official_eagle3(tmp_path / "theirs", head, tiny_target, **ids)
    others = {
        "hidden size 32, got 16": build_llama(320, layers=3, hidden=16, seed=0),
        "rows of the LM head 320, got 384": build_llama(384, layers=3, hidden=32, seed=0),
        r"taps: got \[3\] for a target of 2 layers": build_llama(320, layers=2, hidden=32, seed=0),
    }
    for message, other in others.items():
        with warnings.catch_warnings(), pytest.raises(ValueError, match=message):
            warnings.simplefilter("ignore")
            load_drafter(str(folder), other, tiny_tokenizer)
    tiny_tokenizer.save_pretrained(folder)
    tokens = PreTrainedTokenizerFast.from_pretrained(folder)
    tokens.add_tokens(["<|more|>"])
    big = build_llama(384, layers=3, hidden=32, seed=0)
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=r"320 rows in the draft"):
        load_drafter(str(folder), big, tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, t: t.pop("d2t") is None or t.pop("t2d") is None, "neither d2t nor t2d"),
        (lambda c, t: t.update(d2t=t["d2t"] + torch.arange(160) * 2), "point outside"),
        (lambda c, t: t.pop("lm_head.weight"), "has no lm_head.weight"),
        (lambda c, t: t.pop("midlayer.mlp.up_proj.weight"), "missing: midlayer.mlp.up_proj"),
        (lambda c, t: t.update({"midlayer.x": torch.ones(2)}), "unknown: midlayer.x"),
        (lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 2]), r"reads 64 numbers"),
        (lambda c, t: c.update(target_hidden_size=64), "is 32 wide for a target of 64"),
        (lambda c, t: c.pop("hidden_size"), "got no hidden_size"),
        (lambda c, t: t.update(d2t=t["t2d"].nonzero().flatten()), "holds ids in d2t"),
        (lambda c, t: t.update(ids_within()), "holds ids in d2t"),
        (lambda c, t: t.update(all_moved()), "moves tokens of a whole vocabulary"),
        (lambda c, t: t.update({"layers.0.hidden_norm.weight": torch.ones(32)}), "tensor twice"),
        (lambda c, t: c.update(hidden_size="32x"), "hidden_size='32x', expected a whole number"),
        (lambda c, t: c.update(eagle_config=[1]), "expected an object"),
        (
            lambda c, t: c.update(
                transformer_layer_config={"model_type": "mistral"}, speculators_model_type="eagle3"
            ),
            "model_type 'mistral'",
        ),
        (lambda c, t: t["midlayer.mlp.up_proj.weight"].fill_(torch.nan), "aren't finite"),
    ],
)
def test_broken_heads_are_refused(
    tmp_path: Path, tiny_target: Target, change: Callable[..., Any], message: str
) -> None:
    head = made("eagle3", tiny_target)
    assert isinstance(head, Eagle)
    config: dict[str, Any] = sizes_of(head) | {"eagle_aux_hidden_state_layer_ids": [1, 2]}
    tensors = dict(head.on_disk())
    change(config, tensors)
    config |= {"vocab_size": 320}
    folder = written(tmp_path / "t", config, tensors, "model.safetensors")
    with warnings.catch_warnings(), pytest.raises(ValueError, match=message):
        warnings.simplefilter("ignore")
        open_drafter(folder, None).head()


def ids_within() -> dict[str, Tensor]:
    """As offsets these would stay inside the vocabulary too."""
    return {"d2t": torch.arange(160), "t2d": torch.arange(320) < 160}


def all_moved() -> dict[str, Tensor]:
    ids_D = torch.arange(320)
    return {"d2t": ids_D.flip(0) - ids_D, "lm_head.weight": torch.ones(320, 32)}


def test_what_is_left_out_is_said(tmp_path: Path, tiny_target: Target) -> None:
    about = {"layer_types": ["sliding_attention"], "sliding_window": 64}
    about |= {"embed_requires_grad": True, "eagle_aux_hidden_state_layer_ids": [1, 2]}
    folder = official_eagle3(tmp_path / "t", made("eagle3", tiny_target), tiny_target, **about)
    with pytest.warns(UserWarning, match=r"see 64 tokens back.*its embeddings were trained"):
        open_drafter(folder, None)


def test_foreign_hydra_that_we_cannot_run(tmp_path: Path, tiny_target: Target) -> None:
    folder = official_hydra(tmp_path / "t", made("hydra", tiny_target), tiny_target)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"mlp"', '"eagle-attn"'))
    with pytest.raises(ValueError, match=r"hydra_head_arch='eagle-attn'.*expected mlp or prefix"):
        open_drafter(folder, None)


class Other:
    """What an unpickler must not build."""


def test_nothing_but_tensors_is_unpickled(tmp_path: Path, tiny_target: Target) -> None:
    head = made("eagle1", tiny_target)
    folder = official_eagle1(tmp_path / "t", head, tiny_target)
    whole = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cannot be read .*expected a whole file"):
        open_drafter(folder, None)
    (folder / "pytorch_model.bin").write_bytes(whole[:60] + bytes(9) + whole[69:-200] + bytes(200))
    with pytest.raises(ValueError, match=r"cannot be read .*expected a whole file"):
        open_drafter(folder, None)
    torch.save({"fc.weight": Other()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"cannot be read"):
        open_drafter(folder, None)
    (folder / "pytorch_model.bin").unlink()
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(ValueError, match=r"has no weight_map"):
        open_drafter(folder, None)


def test_types_are_those_of_the_file(tmp_path: Path) -> None:
    tensors = {
        "half": torch.zeros(2, 3).bfloat16(),
        "eighth": torch.zeros(2).to(torch.float8_e4m3fn),
        "one": torch.tensor(3),
    }
    folder = written(tmp_path / "t", {}, tensors, "model.safetensors")
    described = Checkpoint(folder).meta
    for name, tensor in tensors.items():
        found = described[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape) and found.is_meta


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", ["one file", "shards", "bin"])
def test_the_outline_of_a_target(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, form: str, tied: bool
) -> None:
    """Embeddings and LM head without the layers, from any form of checkpoint."""
    config = build_llama(320, layers=2, hidden=32, seed=0).config
    config.tie_word_embeddings = tied
    target = LlamaForCausalLM(config)
    on_disk(tmp_path, target, tiny_tokenizer)
    if form == "shards":
        (tmp_path / "model.safetensors").unlink()
        target.save_pretrained(tmp_path, max_shard_size="30KB")
    if form == "bin":
        (tmp_path / "model.safetensors").unlink()
        kept = {n: t for n, t in target.state_dict().items() if not (tied and "lm_head" in n)}
        torch.save(kept, tmp_path / "pytorch_model.bin")
    found = outline(str(tmp_path))
    for one, other in (
        (found.get_input_embeddings(), target.get_input_embeddings()),
        (found.get_output_embeddings(), target.get_output_embeddings()),
        (found.model.norm, target.model.norm),
    ):
        assert torch.equal(one.weight, other.weight)
    assert found.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied
