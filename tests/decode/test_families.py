"""Target families beyond plain full attention: windows, sinks, experts, adapters; and refusals."""

import copy
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, KINDS, SIZES, VOCAB, WINDOW, made
from plain_decoding import plain_decode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.evaluate.answers import divergences
from draftsmith.decode.forward import attention
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.target import TargetSpec, load_target

WINDOWED = [family for family in FAMILIES if family not in ("qwen3-moe", "gpt-neox", "phi")]


def prompts(count: int) -> list[list[int]]:
    """Some longer than the window, some shorter."""
    rng = random.Random(4)
    return [[rng.randrange(4, VOCAB) for _ in range(rng.randint(2, 24))] for _ in range(count)]


def eager(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that keeps transformers' own attention: a decoder sets its own on the model."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


@torch.inference_mode()
def expected(model: PreTrainedModel, params: SamplingParams) -> list[Completion]:
    """Greedy: `generate`; else the reference's plain decoding. One prompt at a time."""
    answers = []
    for index, prompt in enumerate(prompts(6)):
        if params.greedy:
            ids, new = torch.tensor([prompt]), params.max_new_tokens
            ones = torch.ones_like(ids)
            out = model.generate(ids, attention_mask=ones, max_new_tokens=new, do_sample=False)
            tokens = out[0, len(prompt) :].tolist()
        else:
            tokens = plain_decode(
                model, prompt, params, vocab_size=VOCAB, stop_ids=(0,), index=index
            )
        answers.append(Completion(index, prompt, tokens))
    return answers


@cache
def by_transformers(family: str, params: SamplingParams) -> list[Completion]:
    return expected(eager(made(family)), params)


def near(model: PreTrainedModel) -> PreTrainedModel:
    """A draft that is right now and then, so that rounds end at every depth."""
    draft = copy.deepcopy(model)
    torch.manual_seed(1)
    for parameter in draft.parameters():
        parameter.data += 0.1 * parameter.std().nan_to_num() * torch.randn_like(parameter)
    return draft


def differing(
    family: str, tokenizer: PreTrainedTokenizerBase, params: SamplingParams, **settings: Any
) -> int:
    """Answers that differ beyond a confirmed near-tie, decoded in batches of 4."""
    model = made(family)
    draft = LMDrafter(near(model), VOCAB)
    decoder = Decoder(model, tokenizer, draft, K=3, batch_size=4, **settings)
    got = decoder.generate(prompts(6), params)
    own = by_transformers(family, params)
    found = divergences(own, got, eager(model), params, vocab_size=VOCAB, dtype="float32")
    accepted = [sum(completion.accepted) for completion in got]
    assert 0 < sum(accepted) < sum(len(completion.tokens) for completion in got)
    return sum(not d.near_tie for d in found)


GREEDY, COUPLED = SamplingParams(max_new_tokens=24), SamplingParams(1.0, max_new_tokens=24)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_equals_transformers(family: str, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    for params in (GREEDY, COUPLED):
        assert differing(family, tiny_tokenizer, params) == 0


def test_another_backend_decodes_the_same(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    assert differing("gpt-oss", tiny_tokenizer, GREEDY, attention="split") == 0


@pytest.mark.parametrize("family", WINDOWED)
def test_a_decoder_that_ignores_windows_differs(
    family: str, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = attention.Attend.allowed
    monkeypatch.setattr(attention.Attend, "allowed", lambda self, window: allowed(self, None))
    assert differing(family, tiny_tokenizer, GREEDY) > 0


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_window_of_one_shows_a_token_itself_alone(
    family: str, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """As the model's own forward has it; transformers' cache would keep all that came before."""
    model = made(family)
    model.config.sliding_window = 1
    for layer in model.model.layers:
        if getattr(layer.self_attn, "sliding_window", None) is not None:
            layer.self_attn.sliding_window = 1
    ids = prompts(1)[0]
    drafter = LMDrafter(near(model), VOCAB)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    got = Decoder(model, tiny_tokenizer, drafter, K=3).generate([ids], params)[0].tokens
    for token in got:
        assert token == int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        ids = [*ids, token]


@torch.inference_mode()
def test_prefill_applies_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts longer than the window, beside shorter ones in the same call; with sinks in pieces of
    a few queries, as long prompts are.
    """
    monkeypatch.setattr(attention, "PIECE", 5)
    tokens_BN = torch.tensor([prompt + [0] * (24 - len(prompt)) for prompt in prompts(4)])
    lens_B = torch.tensor([len(prompt) for prompt in prompts(4)])
    assert lens_B.min() < WINDOW < lens_B.max()
    for family in FAMILIES:
        own, runner = eager(made(family)), Runner(made(family), VOCAB)
        logits_BV = runner.prefill(runner.pool(4, 32), torch.arange(4), tokens_BN, lens_B)[0]
        wider = made(family)
        wider.config.sliding_window = 64 if family in WINDOWED else None
        for row, prompt in enumerate(prompts(4)):
            ids = torch.tensor([prompt])
            assert torch.allclose(logits_BV[row], own(ids).logits[0, -1], rtol=1e-4, atol=1e-4)
            error = (logits_BV[row] - eager(wider)(ids).logits[0, -1]).abs().max()
            assert (error > 1e-2) == (family in WINDOWED and len(prompt) > WINDOW)


SMALL = {**SIZES, "head_dim": 8}
REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "recurrent": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, state_size=4)),
        "recurrent state",
    ),
    "convolutions": (
        lambda: Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=["conv", *KINDS[1:2], "conv"])),
        r"layers of type \['conv'\]",
    ),
    "chunks": (
        lambda: Llama4ForCausalLM(
            Llama4TextConfig(**SMALL, num_local_experts=2, intermediate_size_mlp=32)
        ),
        r"layers of type \['chunked_attention'\]",
    ),
    "capped": (
        lambda: Gemma2ForCausalLM(
            Gemma2Config(**SMALL, attn_logit_softcapping=None, final_logit_softcapping=30.0)
        ),
        "final_logit_softcapping=30.0",
    ),
    "capped attention": (
        lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=None)),
        "capped attention logits",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_decoded_is_refused_with_its_reason(
    what: str, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    build, reason = REFUSED[what]
    with pytest.raises(ValueError, match=reason):
        Decoder(build(), tiny_tokenizer)


@pytest.fixture
def adapted(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> tuple[Path, Path]:
    """A base model's folder and a LoRA adapter's, trained on it as far as noise goes."""
    peft = pytest.importorskip("peft")
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = made("mistral")
    model.save_pretrained(base)
    tiny_tokenizer.save_pretrained(base)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])
    wrapped = peft.get_peft_model(model, lora)
    torch.manual_seed(5)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.3)
    wrapped.save_pretrained(adapter)
    return base, adapter


@torch.inference_mode()
def test_an_adapter_gives_pefts_own_output(
    adapted: tuple[Path, Path], tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    import peft

    base, adapter = map(str, adapted)
    spec = TargetSpec(base, dtype="float32", adapter=adapter)
    merged, _ = load_target(spec, "cpu")
    bare, _ = load_target(TargetSpec(base, dtype="float32"), "cpu")
    live = peft.PeftModel.from_pretrained(copy.deepcopy(bare), adapter)
    ids = torch.tensor(prompts(1))
    own = live(ids).logits
    assert type(merged) is MistralForCausalLM
    assert not any(p.requires_grad for p in merged.parameters())
    assert torch.allclose(merged(ids).logits, own, rtol=1e-5, atol=1e-5)
    assert (bare(ids).logits - own).abs().max() > 0.1

    answers = expected(copy.deepcopy(live), GREEDY)
    for target in (merged, live):  # a live PeftModel decodes too, its adapter in the layers
        drafter = LMDrafter(made("mistral"), VOCAB)
        decoder = Decoder(target, tiny_tokenizer, drafter, K=3, batch_size=4)
        got = decoder.generate(prompts(6), GREEDY)
        assert [c.tokens for c in got] == [c.tokens for c in answers]


def test_adapters_of_others_are_refused(
    adapted: tuple[Path, Path], tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    import peft

    base, adapter = map(str, adapted)
    with pytest.raises(ValueError, match=r"expected a folder with adapter_config\.json"):
        load_target(TargetSpec(base, adapter=str(tmp_path / "nothing")), "cpu")
    deeper = MistralForCausalLM(MistralConfig(**{**SIZES, "num_hidden_layers": 4}))
    wider = MistralForCausalLM(MistralConfig(**{**SIZES, "hidden_size": 64}))
    mixtral = made("mixtral")
    for other in (deeper, wider, mixtral):
        folder = str(tmp_path / "other")
        other.save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        with pytest.raises(ValueError, match="expected an adapter trained on this very target"):
            load_target(TargetSpec(folder, adapter=adapter), "cpu")
    prompt = peft.get_peft_model(
        made("mistral"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(ValueError, match="PROMPT_TUNING"):
        Decoder(prompt, tiny_tokenizer)
    prompt.save_pretrained(tmp_path / "prompt")
    with pytest.raises(ValueError, match="can't be merged"):
        load_target(TargetSpec(base, adapter=str(tmp_path / "prompt")), "cpu")
