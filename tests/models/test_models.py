"""Targets, drafts, tokenizers: what is built is what was asked, or a clear refusal."""

import json
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    CohereConfig,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from draftsmith.models.disk.provenance import git_commit, machine, provenance
from draftsmith.models.draft_lm import draft_from_config, load_draft, recast
from draftsmith.models.target import (
    TargetSpec,
    check_split,
    head_weight,
    load_target,
    output_head,
    vocab_size,
)
from draftsmith.models.tokenizer import (
    check_logit_width,
    check_same_tokenizer,
    load_tokenizer,
    stand_in_tokenizer,
)

SIZES = {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 64}


def draft(config: PretrainedConfig, **changes: object) -> PreTrainedModel:
    return draft_from_config(config, **{**SIZES, "seed": 0, "vocab_size": 320, **changes})


@pytest.fixture
def saved(
    tmp_path: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    folder = tmp_path / "target"
    tiny_target.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def rewrite(folder: Path, change: object) -> None:
    """Change the tensors of a saved model by a function of their dict."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_target_is_frozen_and_exact(saved: Path, tiny_target: LlamaForCausalLM) -> None:
    model, tokenizer = load_target(TargetSpec(str(saved)), "cpu")
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert model.config._attn_implementation == "sdpa" and model.dtype == torch.float32
    ids = torch.tensor([tokenizer("def f(x):").input_ids])
    assert torch.equal(model(ids).logits, tiny_target(ids).logits)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_target_dtype(saved: Path, dtype: str, expected: torch.dtype) -> None:
    for shrink in (False, True):
        assert load_target(TargetSpec(str(saved), dtype, shrink), "cpu")[0].dtype == expected


def test_target_refusals(saved: Path, tmp_path: Path) -> None:
    for device in ("cuda:99", "nothing", "meta", "cpu:1"):
        with pytest.raises(ValueError, match=f"device: got '{device}', expected one .* has: cpu"):
            load_target(TargetSpec("some/hub-name"), device)
    with pytest.raises(ValueError, match=r"got dtype 'fp8'.*expected one of auto, float32"):
        load_target(TargetSpec(str(saved), "fp8"), "cpu")
    for path in (str(tmp_path / "nowhere"), "some/hub-name"):
        with pytest.raises(ValueError, match=r"got .*neither a folder.*expected.*HF_HUB_OFFLINE"):
            load_target(TargetSpec(path), "cpu")
    weights = saved / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot be read as a causal LM"):
        load_target(TargetSpec(str(saved)), "cpu")
    weights.unlink()
    with pytest.raises(ValueError, match=r"expected a folder with config\.json and whole"):
        load_target(TargetSpec(str(saved)), "cpu")
    weights.write_bytes(whole)
    (saved / "tokenizer.json").write_text('{"version": "1.0", "mod')
    with pytest.raises(ValueError, match=r"tokenizer.json, which cannot be read"):
        load_target(TargetSpec(str(saved)), "cpu")
    for file in saved.glob("*token*"):
        file.unlink()
    with pytest.raises(ValueError, match="without a tokenizer"):
        load_target(TargetSpec(str(saved)), "cpu")


def test_missing_tensor_is_refused_not_randomised(saved: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(saved, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"1 missing: {name}"):
        load_target(TargetSpec(str(saved)), "cpu")


def test_wrong_shape_and_unknown_tensors(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors.update({"extra.weight": torch.ones(2)}))
    load_target(TargetSpec(str(saved)), "cpu")
    with pytest.raises(ValueError, match=r"1 unknown: extra\.weight"):
        load_draft(saved)
    rewrite(saved, lambda tensors: tensors.update({"model.norm.weight": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"1 of another shape: .*model\.norm\.weight"):
        load_target(TargetSpec(str(saved)), "cpu")


FAMILIES = "llama qwen2 qwen3 qwen3_moe mistral mixtral gemma3_text gpt_neox phi3 olmo2 deepseek_v3"


@pytest.mark.parametrize("family", FAMILIES.split())
def test_shrink_keeps_the_family(
    family: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    config = AutoConfig.for_model(family)
    config.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    model, tokenizer = load_target(TargetSpec(str(tmp_path), shrink=True), "cpu")
    assert model.config.model_type == family and model.config.num_hidden_layers == 2
    assert sum(p.numel() for p in model.parameters()) < 500_000
    assert model.config.eos_token_id == tokenizer.eos_token_id == tiny_tokenizer.eos_token_id
    assert model.get_output_embeddings().weight.shape[0] > vocab_size(tokenizer)  # padded
    check_split(model)


def test_shrink_without_anything_at_the_path() -> None:
    spec = TargetSpec("../nowhere/at-all", shrink=True)
    with (
        pytest.warns(UserWarning, match=r"no config.*random Llama"),
        pytest.warns(UserWarning, match=r"no tokenizer.*stand-in"),
    ):
        model, tokenizer = load_target(spec, "cpu")
    assert isinstance(model, LlamaForCausalLM)
    assert tokenizer.decode(tokenizer("if x == 1: é").input_ids) == "if x == 1: é"
    with pytest.warns(UserWarning):
        again, _ = load_target(spec, "cpu")
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_stand_in_template_marks_what_the_assistant_says() -> None:
    tokenizer = stand_in_tokenizer()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "def b"}]
    out = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = zip(out["input_ids"], out["assistant_masks"], strict=True)
    assert tokenizer.decode([i for i, marked in pairs if marked]) == "def b<|end|>"


def test_body_and_head_equal_the_model(tiny_target: LlamaForCausalLM) -> None:
    for model in (tiny_target, draft(Qwen3Config(), tie_word_embeddings=True).bfloat16()):
        check_split(model)
        body, head, _ = output_head(model)
        ids = torch.tensor([[3, 1, 4, 1, 5]])
        logits = body(input_ids=ids).last_hidden_state @ head.T
        torch.testing.assert_close(logits, model(ids).logits)
        assert head is head_weight(model) is model.get_output_embeddings().weight


def test_no_head_alone_where_logits_are_more_than_a_product() -> None:
    with pytest.raises(ValueError, match=r"head has a bias; expected logits that are one matrix"):
        head_weight(draft(PhiConfig(), kv_heads=4))
    with pytest.raises(ValueError, match=r"logit_scale=0.0625"):
        head_weight(draft(CohereConfig(eos_token_id=1)))
    with pytest.raises(ValueError, match=r"final_logit_softcapping=30.0"):
        head_weight(draft(Gemma3TextConfig(final_logit_softcapping=30.0)))


def test_check_split_finds_a_scale_that_no_config_tells() -> None:
    model = draft(LlamaConfig())
    model.lm_head.register_forward_hook(lambda module, args, output: output * 1.03)
    with pytest.raises(ValueError, match=r"body and head apart give other logits \(relative error"):
        check_split(model)


def test_draft_keeps_the_family_and_takes_the_sizes() -> None:
    config = Qwen3Config(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    model = draft(config, layers=3, tie_word_embeddings=True)
    assert type(model).__name__ == "Qwen3ForCausalLM" and model.dtype == torch.float32
    made = model.config
    assert (made.num_hidden_layers, made.hidden_size, made.head_dim) == (3, 32, 8)
    assert (made.num_attention_heads, made.num_key_value_heads) == (4, 2)
    assert (made.intermediate_size, made.vocab_size, made.tie_word_embeddings) == (64, 320, True)
    assert made.rope_parameters["rope_theta"] == 5e5 and len(made.layer_types) == 3
    assert config.num_hidden_layers == 32  # the target's own config is left alone
    assert draft(config, head_dim=64).config.head_dim == 64


def test_draft_layer_kinds_and_rope_fit() -> None:
    assert draft(Gemma3TextConfig(), layers=1).config.layer_types == ["full_attention"]
    kinds = draft(Gemma3TextConfig(), layers=3).config.layer_types
    assert kinds == ["full_attention", "sliding_attention", "full_attention"]
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48}
    long |= {"long_factor": [2.0] * 48, "original_max_position_embeddings": 4096}
    phi = AutoConfig.for_model("phi3", rope_parameters=long)
    with pytest.raises(ValueError, match=r"got pad_token_id=32000 and vocab_size=320"):
        draft(phi)
    rope = draft(phi, vocab_size=32064).config.rope_parameters
    assert rope["rope_type"] == "default" and rope["rope_theta"] == 1e4


def test_draft_is_seeded_and_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (draft(LlamaConfig(), seed=seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 30}, r"got hidden=30 and heads=4.*multiple.*try hidden=32"),
        ({"hidden": 20}, r"head size of 5 .*expected an even one.*try hidden=24"),
        ({"kv_heads": 3}, r"heads=4 and kv_heads=3.*divisor of 4"),
        ({"layers": 0}, r"num_hidden_layers=0; expected at least 1"),
        ({"tie_embeddings": True}, r"tie_embeddings=True; expected a field of LlamaConfig"),
    ],
)
def test_draft_sizes_that_cannot_be(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draft(LlamaConfig(), **changes)


def test_draft_families_that_need_more_words() -> None:
    with pytest.raises(ValueError, match=r"mixture of experts \(num_experts=128\)"):
        draft(Qwen3MoeConfig())
    assert draft(Qwen3MoeConfig(), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    with pytest.raises(ValueError, match=r"kv_heads=2 with heads=4; expected them equal"):
        draft(AutoConfig.for_model("gpt_neox"))
    with pytest.raises(ValueError, match=r"opt family, whose config has no intermediate_size"):
        draft(AutoConfig.for_model("opt"), kv_heads=4)


def edited_tokenizer(folder: Path, old: str, new: str) -> PreTrainedTokenizerFast:
    """A saved tokenizer with one token of its vocabulary renamed."""
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary[new] = vocabulary.pop(old)
    content["model"]["merges"] = [
        merge for merge in content["model"]["merges"] if old not in [*merge, "".join(merge)]
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return load_tokenizer(folder)


def test_same_tokenizer_with_padded_logits_simply_works(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tiny_tokenizer.save_pretrained(tmp_path)
    check_same_tokenizer(tiny_tokenizer, load_tokenizer(tmp_path))
    assert vocab_size(tiny_tokenizer) == len(tiny_tokenizer) == 320
    for rows in (320, 512):
        check_logit_width(rows, tiny_tokenizer, "the draft")
    with pytest.raises(ValueError, match=r"head of 319 rows in the draft and a tokenizer of 320"):
        check_logit_width(319, tiny_tokenizer, "the draft")


def test_narrow_target_is_refused(saved: Path) -> None:
    tokenizer = load_tokenizer(saved)
    tokenizer.add_tokens(["<|more|>"])
    tokenizer.save_pretrained(saved)
    with pytest.raises(ValueError, match=r"320 rows in the target .* tokenizer of 321"):
        load_target(TargetSpec(str(saved)), "cpu")


def test_different_tokenizers_name_the_ids(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tiny_tokenizer.save_pretrained(tmp_path)
    token = tiny_tokenizer.convert_ids_to_tokens(319)
    other = edited_tokenizer(tmp_path, token, "zzz")
    with pytest.raises(ValueError) as caught:
        check_same_tokenizer(tiny_tokenizer, other)
    message = str(caught.value)
    assert f"id 319: target {token!r}, draft 'zzz'" in message
    assert "differ at 1 of 320 ids" in message and "expected the same token at every id" in message
    grown = load_tokenizer(shutil.copytree(tmp_path, tmp_path / "grown"))
    grown.add_tokens(["<|more|>"])
    with pytest.raises(ValueError, match=r"id 320: target nothing, draft '<\|more\|>'"):
        check_same_tokenizer(other, grown)


def test_provenance_tells_commit_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["recipe=quickstart/distill", "lr=1"]
    record = provenance(argv=argv, seed=1, data_hash="ab", steps=3, acceptance=None)
    assert json.loads(json.dumps(record)) == record
    assert record["recipe"] == "quickstart/distill" and record["seeds"] == {"run": 1}
    assert record["versions"]["torch"] == torch.__version__ and record["acceptance"] is None
    file = tmp_path / "file.py"
    file.write_text("")
    assert git_commit(file) is None  # no repository
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert git_commit(file) is None  # a repository, but not of this file
    subprocess.run([*git, "add", "file.py"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    commit = git_commit(file)
    assert commit is not None and len(commit) == 40
    file.write_text("changed")
    assert git_commit(file) == commit + "-dirty"
    (tmp_path / "COMMIT").write_text(f"{commit}\n")
    monkeypatch.setattr(resources, "files", {"draftsmith": tmp_path}.__getitem__)
    installed = tmp_path / "installed.py"
    assert git_commit(installed) == commit  # of a copy that git doesn't track
    assert git_commit(file) == commit + "-dirty"


def test_recasting_rounds_weights_and_leaves_rotary_frequencies() -> None:
    model = draft(LlamaConfig(), tie_word_embeddings=True, bos_token_id=1, eos_token_id=2)
    exact = model.model.rotary_emb.inv_freq.clone()
    recast(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.rotary_emb.inv_freq, exact)
    assert not torch.equal(exact, exact.bfloat16().float())  # which is what .to(dtype) would leave


def test_a_machines_widest_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, wanted in (("avx2 avx512f", " (avx512f)"), ("sse4", "")):
        told = f"model name\t: A Z80\nflags\t\t: {flags}\n"
        monkeypatch.setattr(Path, "exists", lambda self: True)
        monkeypatch.setattr(Path, "read_text", lambda self, told=told: told)
        assert machine("cpu").endswith(f" cores of A Z80{wanted}")
