"""Block drafters in the official layouts: what is written, what is read, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_folders import equal_heads, made, on_disk, ours, written
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.models.folder.drafter_folder import open_drafter
from draftsmith.models.heads.block import Block
from draftsmith.models.heads.head import Head
from draftsmith.models.servers.doctor import examine
from draftsmith.models.servers.export import export, serve_line
from draftsmith.models.vocab import DraftVocab

Target = LlamaForCausalLM
Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]
MARKOV = {"light.before": "markov_head.markov_w1", "light.after": "markov_head.markov_w2"}


def theirs(head: Head) -> dict[str, Tensor]:
    """A head's tensors by the published names, written out."""
    assert isinstance(head, Block)
    made = {}
    for name, tensor in head.on_disk().items():
        for ours_is, name_is in MARKOV.items():
            name = name.replace(ours_is, name_is)
        made[name] = tensor
    return made


def sizes(head: Head) -> dict[str, Any]:
    assert isinstance(head, Block)
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim"
    names += " num_key_value_heads rms_norm_eps max_position_embeddings vocab_size"
    found = {name: getattr(head.config.layer, name) for name in names.split()}
    return found | {"model_type": "qwen3", "hidden_act": "silu", "rope_theta": 50000.0}


def dflash(folder: Path, head: Head, target: Target, **change: Any) -> Path:
    """z-lab's: block_size beside the rest or above it, the taps as layers' numbers from 0."""
    assert isinstance(head, Block)
    inner = {"mask_token_id": 7, "target_layer_ids": [tap - 1 for tap in head.taps]}
    config = sizes(head) | {"architectures": ["DFlashDraftModel"], "block_size": 5}
    config |= {"dflash_config": inner, "num_target_layers": 3, "tie_word_embeddings": True}
    return written(folder, config | change, theirs(head), "model.safetensors")


def dspark(folder: Path, head: Head, target: Target) -> Path:
    """DeepSpec's: all above, frozen copies of the target's matrices, a confidence head."""
    assert isinstance(head, Block)
    config = sizes(head) | {"architectures": ["Qwen3DSparkModel"], "block_size": 4}
    config |= {"target_layer_ids": [tap - 1 for tap in head.taps], "mask_token_id": 7}
    config |= {"markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True}
    tensors = theirs(head) | {"confidence_head.proj.weight": torch.ones(1, 38)}
    tensors["embed_tokens.weight"] = target.get_input_embeddings().weight
    tensors["lm_head.weight"] = target.lm_head.weight.clone()
    return written(folder, config, tensors, "model.safetensors")


LAYOUTS = {"dflash": dflash, "dspark": dspark}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_tensor_arrives_and_it_decodes(
    tmp_path: Path, tiny_target: Target, tiny_tokenizer: PreTrainedTokenizerFast, kind: str
) -> None:
    head = made(kind, tiny_target, qwen=True, layers=2)
    folder = LAYOUTS[kind](tmp_path / "theirs", head, tiny_target)
    with pytest.warns(UserWarning, match="not known to be made for this target"):
        opened = open_drafter(folder, None, target_config=tiny_target.config)
    assert opened.kind == kind and opened.head().levels == 4
    equal_heads(opened.head(), head)
    found = opened.head().bind(tiny_target)
    assert isinstance(found, Block)
    assert torch.equal(found.mask_H, tiny_target.get_input_embeddings().weight[7])
    with pytest.warns(UserWarning, match="not known"):
        drafter = load_drafter(str(folder), tiny_target, tiny_tokenizer)
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, K=3)
    for params in SETTINGS[:2]:
        done = decoder.generate(PROMPTS[:2], params)
        assert [c.tokens for c in done] == truths(tiny_target, tiny_tokenizer, params)[:2]


@pytest.fixture
def place(tmp_path: Path, tiny_target: Target, tiny_tokenizer: PreTrainedTokenizerFast) -> Any:
    """Saves a head in our layout; gives its folder, the head, and the target's path."""
    path = on_disk(tmp_path / "target", tiny_target, tiny_tokenizer)

    def saved(kind: str, **about: Any) -> tuple[str, Head, str]:
        head = made(kind, tiny_target, **({"qwen": True} | about))
        folder = ours(tmp_path / f"head-{kind}", head, tiny_target, tiny_tokenizer)
        return str(folder), head, path

    return saved


@pytest.mark.parametrize("to", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_what_servers_read(
    place: Any, tmp_path: Path, tiny_target: Target, kind: str, to: str
) -> None:
    """The names and numbers of the published folders, and the head again from them."""
    folder, head, path = place(kind)
    line = export(folder, path, to, str(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == theirs(head).keys()
    for name, tensor in theirs(head).items():
        assert torch.equal(tensors[name], tensor), name
    named = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}
    assert config["architectures"] == [named[kind]] and config["model_type"] == "qwen3"
    for said in (config, config["dflash_config"]):
        assert said["target_layer_ids"] == [0, 1] and said["mask_token_id"] == 7
        assert said["block_size"] == {"dflash": 5, "dspark": 4}[kind]
    assert config["num_target_layers"] == 3 and not config["is_causal"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50000.0
    assert (config.get("markov_rank"), kind) in [(None, "dflash"), (6, "dspark")]
    wanted = {
        "vllm": f'"method": "{kind}"',
        "sglang": f"--speculative-algorithm {kind.upper()} --speculative-draft-model-path",
    }
    assert wanted[to] in line and "eagle-topk" not in line
    # The folder says K=3 by default; a block is drafted as it was trained.
    assert '"num_speculative_tokens": 4' in line or to == "sglang"
    lines = serve_line(folder, path)
    assert '"num_speculative_tokens": 4' in lines
    converted = f"to=sglang out={folder}-sglang && python convert_hf_to_gguf.py {folder}-sglang "
    assert converted in lines and f"--spec-type draft-{kind} --spec-draft-n-max 4 " in lines
    assert ('"decoding_type": "DFlash"' in lines) == (kind == "dflash")
    with pytest.warns(UserWarning, match="not known to be made for this target"):
        again = open_drafter(tmp_path / "out", None, target_config=tiny_target.config).head()
    equal_heads(again, head)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_part_of_the_tokens_goes_to_speculators_and_back(
    tmp_path: Path, tiny_target: Target, tiny_tokenizer: PreTrainedTokenizerFast, kind: str
) -> None:
    """As their training does by default; other layouts have the whole vocabulary."""
    path = on_disk(tmp_path / "target", tiny_target, tiny_tokenizer)
    head, some = made(kind, tiny_target, qwen=True), DraftVocab(torch.arange(0, 320, 3), 320)
    folder = str(ours(tmp_path / "head", head, tiny_target, tiny_tokenizer, some))
    export(folder, path, "speculators", str(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert config["draft_vocab_size"] == len(some.ids_D) == 107
    assert config["transformer_layer_config"]["vocab_size"] == 320
    assert torch.equal(tensors["d2t"], some.d2t_D) and torch.equal(tensors["t2d"], some.t2d_V)
    assert torch.equal(tensors["lm_head.weight"], tiny_target.lm_head.weight[::3])
    with pytest.warns(UserWarning, match="not known"):
        opened = open_drafter(tmp_path / "out", None, target_config=tiny_target.config)
    assert opened.vocab is not None and torch.equal(opened.vocab.ids_D, some.ids_D)
    again = opened.head().state_dict()
    for name, tensor in head.state_dict().items():
        kept = some.t2d_V[:, None] if name == "light.after.weight" else torch.ones(1)
        assert torch.equal(again[name], tensor * kept), name
    with pytest.warns(UserWarning, match="not known"):
        drafter = load_drafter(str(tmp_path / "out"), tiny_target, tiny_tokenizer)
    done = Decoder(tiny_target, tiny_tokenizer, drafter, K=3).generate(PROMPTS[:2], SETTINGS[0])
    assert [c.tokens for c in done] == truths(tiny_target, tiny_tokenizer, SETTINGS[0])[:2]
    own = load_drafter(folder, tiny_target, tiny_tokenizer)
    like = Decoder(tiny_target, tiny_tokenizer, own, K=3).generate(PROMPTS[:2], SETTINGS[0])
    assert [c.accepted for c in done] == [c.accepted for c in like]
    for place in (folder, str(tmp_path / "out")):
        _, findings = examine(place, path)
        assert not [one for one in findings if one.verdict == "fault"]
    assert "speculators' layout of block drafters" in serve_line(folder, path)
    export(folder, path, "vllm", str(tmp_path / "whole"))
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert whole.keys() == theirs(head).keys()
    if kind == "dspark":  # whose light head says nothing of other tokens
        with pytest.raises(ValueError, match="only speculators' layout can say"):
            export(str(tmp_path / "out"), path, "vllm", str(tmp_path / "half"))
        tensors["markov_head.markov_w2.weight"] = torch.zeros(320, 6)
        cut = written(tmp_path / "cut", config, tensors, "model.safetensors")
        with pytest.raises(ValueError, match="320 rows of markov_w2; expected 107"):
            open_drafter(cut, None, target_config=tiny_target.config)


def test_a_mask_of_its_own_goes_to_vllm(place: Any, tmp_path: Path, tiny_target: Target) -> None:
    folder, head, path = place("dflash", mask_token=-1)
    assert isinstance(head, Block)
    lines = serve_line(folder, path).splitlines()
    assert "to=vllm" in lines[0] and all("# not for " in line for line in lines[1:])
    export(folder, path, "vllm", str(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    state = torch.load(tmp_path / "out" / "mask_embedding.pt", weights_only=True)
    assert torch.equal(state["embedding"], head.mask)
    ends = tiny_target.config
    assert config["mask_token_id"] in (ends.pad_token_id, ends.bos_token_id, ends.eos_token_id)
    with pytest.warns(UserWarning, match="not known"):
        again = open_drafter(tmp_path / "out", None).head()
    equal_heads(again, head)
    for kind, to in (("dflash", "sglang"), ("dflash", "speculators"), ("dspark", "vllm")):
        folder, _, path = place(kind, mask_token=-1)
        with pytest.raises(ValueError, match=f"to={to}: .*MASK is a vector .* head.mask_token"):
            export(folder, path, to, str(tmp_path / "no"))
        assert not (tmp_path / "no").exists()
    lines = serve_line(folder, path).splitlines()
    names = ["vLLM 0.33", "SGLang 0.5.23", "speculators 0.9", "llama.cpp"]
    assert [x.split(": its MASK")[0] for x in lines] == [f"# not for {name}" for name in names]


@pytest.mark.parametrize(
    ("kind", "about", "to", "reason"),
    [
        ("dflash", {"qwen": False}, "vllm", "no norms on queries and keys: .*head.layer=qwen3"),
        ("dflash", {"taps": (0, 2)}, "speculators", r"what taps \[0, 2\] are, other than 1 to"),
        ("dflash", {"taps": (1, 3)}, "sglang", r"what taps \[1, 3\] are"),
        ("block", {"light": "gru", "mask": "full"}, "speculators", "no light head of kind gru"),
        ("block", {"convs": True}, "speculators", "no short convolutions"),
        ("block", {"noise": True}, "speculators", "nothing tells it the noise"),
        ("block", {"light": "markov"}, "speculators", "its blocks are never causal"),
        ("block", {"light": "rnn", "labels": "same", "mask": "full"}, "speculators", "twice there"),
        ("dflash2", {}, "vllm", "kind dflash2, which vllm doesn't load; no server does"),
        ("jetspec", {}, "sglang", "kind jetspec, which sglang doesn't load; these do: vllm"),
    ],
)
def test_what_a_layout_cannot_say(
    place: Any, tmp_path: Path, kind: str, about: dict[str, Any], to: str, reason: str
) -> None:
    folder, _, path = place(kind, **about)
    with pytest.raises(ValueError, match=reason):
        export(folder, path, to, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_causal_blocks_go_to_vllm(place: Any, tmp_path: Path, tiny_target: Target) -> None:
    folder, head, path = place("jetspec")
    export(folder, path, "vllm", str(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["is_causal"]
    with pytest.warns(UserWarning, match="not known"):
        opened = open_drafter(tmp_path / "out", None, target_config=tiny_target.config)
    assert opened.kind == "jetspec"
    equal_heads(opened.head(), head)


def changed(folder: Path, change: Change) -> Path:
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def say(**fields: Any) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        inner = {name: fields[name] for name in fields if name in config["dflash_config"]}
        config |= fields
        config["dflash_config"] |= inner

    return change


def add(name: str) -> Change:
    return lambda config, tensors: tensors.update({name: torch.ones(2)})


REFUSED: dict[str, tuple[Change, str]] = {
    "DFlash-2": (add("layers.0.attention_conv.base_kernel"), "DFlash-2's convolutions"),
    "its selector": (add("candidate_selector.hidden_projection.weight"), "selector of the 16"),
    "Domino": (add("prefix_gru.weight_ih_l0"), "Domino's GRU"),
    "half the tokens": (say(draft_vocab_size=160), "drafts 160 of 320 tokens"),
    "a map": (add("d2t"), "moves tokens of a whole vocabulary"),
    "no MASK": (say(mask_token_id=None), "mask_token_id=None; expected all three"),
    "no size": (say(block_size=None), "block_size=None"),
    "no layers": (say(target_layer_ids=[]), r"says layers \[\]"),
    "other layers": (say(target_layer_ids=[0, 1, 2]), "reads 64 numbers, and 3 layers"),
    "scaled logits": (say(output_multiplier=0.2), "output_multiplier=0.2; expected 1"),
    "mixed windows": (
        say(layer_types=["full_attention", "sliding_attention"]),
        "a window and without",
    ),
    "a light head": (say(markov_rank=6, markov_head_type="mlp"), "a head of type 'mlp'"),
    "no context norm": (lambda config, t: t.pop("hidden_norm.weight"), "hidden_norm.weight"),
    "a layer short": (say(num_hidden_layers=3), "layers.2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_we_have_no_place_for(tmp_path: Path, tiny_target: Target, name: str) -> None:
    change, reason = REFUSED[name]
    head = made("dflash", tiny_target, qwen=True, layers=2)
    folder = changed(dflash(tmp_path / "theirs", head, tiny_target), change)
    with pytest.raises(ValueError, match=reason):
        open_drafter(folder, None, target_config=tiny_target.config)


@pytest.mark.parametrize(
    ("fields", "mask"),
    [({}, "causal"), ({"is_causal": False}, "full"), ({"sliding_window_non_causal": True}, "full")],
)
def test_a_window_is_said(
    tmp_path: Path, tiny_target: Target, fields: dict[str, Any], mask: str
) -> None:
    head = made("dflash", tiny_target, qwen=True, layers=2)
    window = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64} | fields
    folder = dflash(tmp_path / "theirs", head, tiny_target, **window)
    with pytest.warns(UserWarning, match="trained to see 64 tokens back; here they see all"):
        found = open_drafter(folder, None).head()
    assert isinstance(found, Block) and found.config.mask == mask
