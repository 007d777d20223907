"""The doctor's checks of EAGLE-1 and EAGLE-3 heads, flat or in speculators' format.

Each is a function of a case that yields the problems it finds. What servers do is read from their
loaders.

Shapes: V rows of the target's LM head, D draft vocabulary, H hidden.
"""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from draftsmith.models.folder.foreign import rope_parameters
from draftsmith.models.folder.imports import READERS
from draftsmith.models.heads.eagle import EAGLE3_NAMES
from draftsmith.models.heads.eagle_layouts import unread_by_sglang
from draftsmith.models.server_facts import EAGLE1_OF_SGLANG, USUAL_TAPS
from draftsmith.models.servers.doctor_vocab import vocabulary
from draftsmith.models.servers.findings import RANDOM, REFUSES, Case, Check, Finding, fault, warning
from draftsmith.models.servers.serve_lines import about

IDS = "eagle_aux_hidden_state_layer_ids"
# Tensors that have a check of their own.
OWN = re.compile(r"(fc|lm_head|input_norm)\.|fc_norm|d2t|t2d|.*_proj\.bias")


def tensors(case: Case) -> Iterator[Finding]:
    """Missing, unknown and misshapen tensors, apart from those that have a check of their own."""
    try:  # of a target that isn't given only the number of layers is made up, and the taps with it
        stand_in: Any = SimpleNamespace(num_hidden_layers=8, vocab_size=0)
        read = READERS[case.layout](case.raw, case.checkpoint, case.target_config or stand_in)
        faults = read.faults(case.checkpoint)
    except ValueError:
        return  # another check says why, or our own loader
    missing, unknown, odd = (
        [name for name in names if not OWN.match(name)] for names in faults.values()
    )
    if missing:
        yield fault(
            f"{len(missing)} missing: {', '.join(missing[:3])}",
            "take the folder from where it was whole; train again",
            vllm_sglang_speculators=RANDOM,
            draftsmith=REFUSES,
        )
    if unknown:
        yield fault(
            f"{len(unknown)} without a place: {', '.join(unknown[:3])}",
            "rename them as the others are, or drop them",
            vllm_draftsmith=REFUSES,
            sglang="skips them, and leaves random what they were for, without a word",
            speculators="skips them with a warning",
        )
    if odd:
        yield fault(
            f"{len(odd)} of another shape: {', '.join(odd[:3])}",
            "config.json and weights are of two heads: restore them",
            vllm_sglang_speculators_draftsmith=REFUSES,
        )
    if case.layout == "speculators" and any("midlayer." in t for t in case.checkpoint.file_of):
        yield fault(
            "tensors called midlayer.* in speculators' format, whose name is layers.0.*",
            "python -m draftsmith export to=speculators writes the names it reads",
            speculators=RANDOM + " but a load report",
        )


def layer_ids(case: Case) -> Iterator[Finding]:
    """Which layers of the target are tapped, in vLLM's and in SGLang's convention."""
    top = case.config.get(IDS)
    nested = (case.config.get("eagle_config") or {}).get(IDS)
    layers, flat = case.target_layers, case.layout == "eagle3"
    mend = f"write {IDS} at the top level (layers already run) and in eagle_config (that - 1)"
    if not top and not nested:
        yield warning(
            f"no layers named: every server takes {USUAL_TAPS}",
            f"right if it was trained on them; {mend}",
        )
        return
    by_nested = [i + 1 for i in nested] if nested else None
    takes = f"doesn't read them: taps {USUAL_TAPS}"
    for name, found, reader in (("nested", nested, "vllm"), ("top-level", top, "sglang")):
        alone = flat and bool(found) and not (top and nested)
        count = _usual_for(top or by_nested or [])
        if (alone and count is None) or (alone and layers not in (None, count)):
            does = {reader: f"{takes}, and accepts next to nothing"}
            yield fault(f"only the {name} ids, {found}", mend, **does)
        elif alone and layers is None:
            says = f"only the {name} ids, {found}: right for a target of {count} layers"
            yield warning(says, mend, **{reader: takes})
    if top and by_nested and by_nested != top:
        yield fault(
            f"top level {top}, nested {nested}: the second + 1 should be the first",
            f"find out which the head was trained on, then {mend}",
            vllm=f"taps {top}",
            sglang=f"taps {by_nested}",
            draftsmith=f"taps {top}",
        )
    ids = top or by_nested or []
    if ids != sorted(set(ids)):
        yield fault(
            f"ids {ids} repeat, or don't ascend",
            "sort them, and the columns of fc.weight with them",
            vllm_sglang="takes them in the order of the layers",
        )
    outside = [i for i in ids if i < 0 or (layers is not None and i > layers)]
    if outside:
        yield fault(
            f"ids {outside} of a target of {layers} layers",
            "take the ids that the head was trained with, or the target it was made for",
            vllm_sglang="sees fewer taps than fc reads",
            speculators_draftsmith=REFUSES,
        )


def _usual_for(ids: list[int]) -> int | None:
    """The number of layers of a target that EAGLE-3 usually taps at `ids`, None where there is
    none.
    """
    layers = ids[-1] + 3 if ids else 0
    return layers if ids == [2, layers // 2, layers - 3] else None


def fc(case: Case) -> Iterator[Finding]:
    """The matrix that fuses what the head reads."""
    weight, hidden = case.meta("fc.weight"), int(case.config["hidden_size"])
    if weight is None:
        yield fault("no fc.weight", "restore it", vllm_sglang_speculators=RANDOM)
        return
    apart = case.config.get("target_hidden_size") or hidden
    if case.layout == "eagle1":
        if tuple(weight.shape) != (hidden, 2 * hidden):
            yield fault(
                f"fc.weight is {list(weight.shape)}, expected {[hidden, 2 * hidden]}",
                "config.json and weights are of two heads: restore them",
            )
        return
    ids = case.config.get(IDS) or (case.config.get("eagle_config") or {}).get(IDS) or [0, 0, 0]
    if weight.shape[1] != len(ids) * apart:
        yield fault(
            f"fc.weight reads {weight.shape[1]} numbers, {len(ids)} taps of {apart} are "
            f"{len(ids) * apart}",
            "name as many layers as the head was trained on, or check target_hidden_size",
            vllm_sglang_draftsmith=REFUSES,
        )
    if apart != hidden:
        yield warning(
            f"a head of width {hidden} for a target of width {apart}",
            "serve it with vLLM or SGLang",
            draftsmith="has no heads narrower than their target",
        )


def norms(case: Case) -> Iterator[Finding]:
    """Norm flags against norm tensors, and what the readers make of a missing flag."""
    config = (case.config.get("eagle_config") or {}) | case.config
    for flag, prefix in (("fc_norm", "fc_norm."), ("norm_before_fc", "input_norm.")):
        has = any(name.startswith(prefix) for name in case.names)
        if has and not config.get(flag):
            yield fault(
                f"{prefix}* in the file, and {flag} isn't set",
                f"write {flag}: true",
                vllm=REFUSES,
                sglang="skips the norm, without a word",
                speculators="skips the norm with a warning",
            )
        if config.get(flag) and not has:
            yield fault(
                f"{flag} is set, and there is no {prefix}* in the file",
                f"write {flag}: false, or restore the tensors",
                vllm_sglang_speculators="runs it with norms as they are born",
            )
    if case.layout == "speculators" and "norm_before_residual" not in case.raw:
        yield fault(
            "norm_before_residual isn't written",
            "write what it was trained with",
            vllm="takes it for true",
            speculators_draftsmith="takes it for false",
        )


def readers(case: Case) -> Iterator[Finding]:
    """What one server's loader lacks or calls otherwise: norms on queries and keys, further layers,
    and what SGLang ignores.
    """
    if "sliding_attention" in (case.config.get("layer_types") or []):
        yield warning(
            f"its layer sees {case.config.get('sliding_window')} tokens back",
            "serve it with vLLM",
            sglang="sees all, unless --speculative-draft-window-size says so",
            draftsmith="sees all: beyond that acceptance may fall",
        )
    if case.layout == "speculators":
        yield from _speculators(case)
    if case.layout != "eagle3":
        return
    named = (case.raw.get("architectures"), case.raw.get("model_type"))
    if any("q_norm" in name for name in case.names) and named != ([EAGLE3_NAMES["qwen3"]], "qwen3"):
        yield fault(
            f"norms on queries and keys, under the name {named[0]} ({named[1]})",
            f"write {EAGLE3_NAMES['qwen3']} and qwen3; `python -m draftsmith export to=vllm` does",
            vllm=REFUSES,
            sglang="skips the norms, without a word",
        )
    kept = case.config | {"num_hidden_layers": 1}
    nested = (case.config.get("eagle_config") or {}).get(IDS)
    kept |= {IDS: kept.get(IDS) or [i + 1 for i in nested or ()]}
    reason = unread_by_sglang(kept, case.target_layers)
    if reason:
        wrong = "drafts wrongly, without a word"
        yield warning(f"not for SGLang: {reason}", "serve it with vLLM", sglang=wrong)
    if int(case.config.get("num_hidden_layers", 1)) < 2:
        return
    to, born = "`python -m draftsmith export to=", "runs with a norm as it is born"
    if any(re.search(r"layers\.[1-9]\d*\.hidden_norm", t) for t in case.checkpoint.file_of):
        yield warning("layers.1.hidden_norm, SGLang's name", f"{to}vllm`", vllm=born)
    else:
        says = "layers.1.input_layernorm, vLLM's name"
        yield warning(says, f"{to}sglang`", sglang=f"{born}, without a word")


def _speculators(case: Case) -> Iterator[Finding]:
    verifier = (case.raw.get("speculators_config") or {}).get("verifier") or {}
    if not verifier.get("name_or_path"):
        yield fault(
            "verifier.name_or_path isn't written",
            "write the target's, or `python -m draftsmith export to=speculators`",
            speculators="fails",
            vllm="doesn't know the target",
        )
    kind = (case.raw.get("transformer_layer_config") or {}).get("model_type")
    if kind not in EAGLE3_NAMES:
        yield fault(
            f"transformer_layer_config has model_type {kind!r}",
            f"write {' or '.join(EAGLE3_NAMES)}, whichever it is",
            vllm_draftsmith=REFUSES,
        )


def tied(case: Case) -> Iterator[Finding]:
    """An LM head of its own."""
    if case.config.get("tie_word_embeddings"):
        yield fault(
            "tie_word_embeddings is true",
            "write false: the head's LM head, or the target's, isn't the embedding",
            sglang="takes the embeddings for the LM head",
            vllm="may do the same",
        )


def rotary(case: Case) -> Iterator[Finding]:
    """Both generations of rotary fields, saying the same."""
    config, now = case.config, case.config.get("rope_parameters")
    if now and case.layout == "speculators":
        return  # its readers have transformers 5
    theta = rope_parameters(config)["rope_theta"]
    if now and "rope_theta" in config:
        scaling = config.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if config["rope_theta"] != theta or kind != now.get("rope_type", "default"):
            yield fault(
                f"rope_theta {config['rope_theta']} and rope_scaling {kind} beside "
                f"rope_parameters {now}",
                "write what it was trained with into both",
                vllm="reads one or the other, by its version",
                sglang="reads rope_parameters",
            )
    elif now:
        yield warning(
            "only rope_parameters",
            f"write rope_theta: {theta} beside it",
            vllm_sglang="before transformers 5, turns by 10,000",
        )
    else:
        yield warning(
            "only the rotary fields of before transformers 5"
            if "rope_theta" in config
            else "no rotary fields: 10,000",
            "write rope_parameters beside rope_theta; `python -m draftsmith export` does",
        )


def biases(case: Case) -> Iterator[Finding]:
    """Biases that a server has no place for, or makes up."""
    config, bias = case.config, "fc.bias" in case.names
    invented = "gives the attention biases that nothing fills"
    if config.get("bias"):
        say = warning if case.layout == "eagle1" else fault
        mend = "write false: `python -m draftsmith export` does"
        yield say("bias is true", mend, vllm_sglang=invented)
    flag = bool(config.get("attention_bias"))
    has = any(re.search(r"self_attn\..*_proj\.bias", name) for name in case.names)
    if has != flag:
        yield fault(
            "biases of the attention, and attention_bias isn't set"
            if has
            else "attention_bias is set, and there are no such biases in the file",
            f"write attention_bias: {str(has).lower()}, or restore the tensors",
            vllm=REFUSES if has else invented,
            sglang="has none: it skips them, without a word",
            draftsmith=REFUSES,
        )
    if case.layout != "eagle1":
        if bias:
            mend = "drop it, if zero"
            yield fault("fc.bias", mend, vllm_draftsmith=REFUSES, sglang="skips it, unless bias")
        return
    if bias and bool(case.value("fc.bias").any()):
        yield warning("fc.bias isn't zero", "serve it with SGLang", vllm="doesn't add it")
    if not bias:
        yield warning(
            "no fc.bias", "`export to=sglang` writes a zero one", sglang="adds a random one"
        )
    if case.raw.get("architectures") != [EAGLE1_OF_SGLANG]:
        yield warning(
            f"architectures {case.raw.get('architectures')}",
            "`python -m draftsmith export to=sglang`",
            sglang=f"wants {EAGLE1_OF_SGLANG}",
        )


def path_name(case: Case) -> Iterator[Finding]:
    """vLLM guesses the method from the path."""
    if case.layout == "speculators":
        return
    method = about(case.layout).stacks["vllm"].method
    part = "eagle-" if method == "eagle" else method
    if part not in str(case.folder.resolve()).lower():
        yield warning(
            f"the path has no {part!r} in it",
            f'pass "method": "{method}" in --speculative-config',
            vllm="takes it for a draft LM, unless the method is given",
        )


EAGLE3: dict[str, Check] = {
    "tensors": tensors,
    "layer ids": layer_ids,
    "fc": fc,
    "draft vocabulary": vocabulary,
    "norm flags": norms,
    "one server alone": readers,
    "own LM head": tied,
    "rotary fields": rotary,
    "biases": biases,
    "path name": path_name,
}
EAGLE1: dict[str, Check] = {
    name: EAGLE3[name]
    for name in (
        *("tensors", "fc", "one server alone", "own LM head", "rotary fields", "biases"),
        "path name",
    )
}
