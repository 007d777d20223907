"""The doctor's checks of EAGLE-1 and EAGLE-3 heads, flat or in speculators' format.

Each yields the problems it finds. What servers do is read from their loaders.

Shapes: V rows of the target's LM head, D draft vocabulary.
"""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from draftsmith.models.folder.foreign import holds_ids, rope_parameters
from draftsmith.models.folder.imports import READERS
from draftsmith.models.heads.eagle import EAGLE3_NAMES
from draftsmith.models.layouts.eagle_layouts import IDS, unread_by_llama_cpp, unread_by_sglang
from draftsmith.models.server_facts import EAGLE1_OF_SGLANG, STACKS, USUAL_TAPS
from draftsmith.models.servers.export import about
from draftsmith.models.servers.findings import Case, Check, Finding, fault, warning

RANDOM = "leaves the layer random, without a word"
WRONG_MAP = "loads a wrong map, without a word"
OFFSETS = "write offsets, id - position: `python -m draftsmith export` does"
TWO_HEADS = "config.json and weights are of two heads: restore them"
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
        says = f"{len(missing)} missing: {', '.join(missing[:3])}"
        mend = "take the folder from where it was whole; train again"
        yield fault(says, mend, f"vllm, sglang, speculators: {RANDOM}; draftsmith: refuses it")
    if unknown:
        yield fault(
            f"{len(unknown)} without a place: {', '.join(unknown[:3])}",
            "rename them as the others are, or drop them",
            "vllm, draftsmith: refuses it; speculators: skips them with a warning; "
            "sglang: skips them, and leaves random what they were for, without a word",
        )
    if odd:
        says = f"{len(odd)} of another shape: {', '.join(odd[:3])}"
        yield fault(says, TWO_HEADS, "vllm, sglang, speculators, draftsmith: refuses it")
    if case.layout == "speculators" and any("midlayer." in t for t in case.checkpoint.file_of):
        says = "tensors called midlayer.* in speculators' format, whose name is layers.0.*"
        mend = "python -m draftsmith export to=speculators writes the names it reads"
        yield fault(says, mend, f"speculators: {RANDOM} but a load report")


def layer_ids(case: Case) -> Iterator[Finding]:
    """Which layers of the target are tapped, in vLLM's and in SGLang's convention."""
    (top, nested), layers = case.ids, case.target_layers
    ids = top or nested or []
    mend = f"write {IDS} at the top level (layers already run) and in eagle_config (that - 1)"
    if not ids:
        says = f"no layers named: every server takes {USUAL_TAPS}"
        yield warning(says, f"right if it was trained on them; {mend}")
        return
    written = [i - 1 for i in nested or ()]
    if case.layout == "eagle3" and not (top and nested):
        says = f"only the nested ids, {written}" if nested else f"only the top-level ids, {top}"
        does = f"{'vllm' if nested else 'sglang'}: doesn't read them: taps {USUAL_TAPS}"
        count = ids[-1] + 3  # layers of a target that EAGLE-3 usually taps so
        if ids != [2, count // 2, count - 3] or layers not in (None, count):
            yield fault(says, mend, f"{does}, and accepts next to nothing")
        elif layers is None:
            yield warning(f"{says}: right for a target of {count} layers", mend, does)
    if top and nested and nested != top:
        says = f"top level {top}, nested {written}: the second + 1 should be the first"
        does = f"vllm, draftsmith: taps {top}; sglang: taps {nested}"
        yield fault(says, f"find out which the head was trained on, then {mend}", does)
    if ids != sorted(set(ids)):
        mend = "sort them, and the columns of fc.weight with them"
        does = "vllm, sglang: takes them in the order of the layers"
        yield fault(f"ids {ids} repeat, or don't ascend", mend, does)
    if outside := [i for i in ids if i < 0 or (layers is not None and i > layers)]:
        yield fault(
            f"ids {outside} of a target of {layers} layers",
            "take the ids that the head was trained with, or the target it was made for",
            "vllm, sglang: sees fewer taps than fc reads; speculators, draftsmith: refuses it",
        )


def fc(case: Case) -> Iterator[Finding]:
    """The matrix that fuses what the head reads."""
    shape, hidden = case.shape("fc.weight"), int(case.config["hidden_size"])
    apart = case.config.get("target_hidden_size") or hidden
    taps = len(case.ids[0] or case.ids[1] or [0, 0, 0])
    if shape is None:
        yield fault("no fc.weight", "restore it", f"vllm, sglang, speculators: {RANDOM}")
        return
    if case.layout == "eagle1":
        if shape != [hidden, 2 * hidden]:
            yield fault(f"fc.weight is {shape}, expected {[hidden, 2 * hidden]}", TWO_HEADS)
        return
    if shape[1] != taps * apart:
        says = f"fc.weight reads {shape[1]} numbers, {taps} taps of {apart} are {taps * apart}"
        mend = "name as many layers as the head was trained on, or check target_hidden_size"
        yield fault(says, mend, "vllm, sglang, draftsmith: refuses it")
    if apart != hidden:
        says = f"a head of width {hidden} for a target of width {apart}"
        does = "draftsmith: has no heads narrower than their target"
        yield warning(says, "serve it with vLLM or SGLang", does)


def vocabulary(case: Case) -> Iterator[Finding]:
    """The draft vocabulary: its size, its LM head, and the maps to the target's tokens."""
    said, whole = case.config.get("draft_vocab_size"), case.config.get("vocab_size")
    shape = case.shape("lm_head.weight")
    if shape is None:
        does = f"sglang: {RANDOM}; speculators: takes the target's rows, without a word"
        yield fault("no lm_head.weight", "restore it", does)
        return
    rows = shape[0]
    if said is None:
        does = "sglang: fails on the missing field; vllm: takes vocab_size"
        yield fault("no draft_vocab_size", f"write {rows}", does)
    elif said != rows:
        says = f"draft_vocab_size is {said}, lm_head.weight has {rows} rows"
        mend = f"write {rows}, if d2t has as many"
        yield fault(says, mend, "vllm, sglang, speculators: refuses it")
    if whole is None:
        yield warning("no vocab_size", "write the target's into config.json")
    elif "d2t" in case.names:
        yield from _maps(case, rows, int(whole))
    elif rows < whole:
        says = f"no d2t, though it drafts {rows} of {whole} tokens"
        does = "vllm, sglang: takes draft ids for the target's; speculators: fails"
        yield fault(says, OFFSETS if "t2d" in case.names else "restore it", does)


def _maps(case: Case, rows: int, whole: int) -> Iterator[Finding]:
    d2t_D = case.value("d2t").long()
    ids_D = d2t_D + torch.arange(len(d2t_D))
    t2d_V = case.value("t2d").bool() if "t2d" in case.names else None
    outside = int(((ids_D < 0) | (ids_D >= whole)).sum())
    if len(d2t_D) != rows:
        says = f"d2t has {len(d2t_D)} entries for {rows} rows"
        yield fault(says, "restore it", "vllm, sglang, speculators, draftsmith: refuses it")
    elif holds_ids(d2t_D, t2d_V, whole):
        says = f"d2t holds ids, not offsets: the last would lead to {int(ids_D[-1])} of {whole}"
        does = f"vllm, sglang: proposes other tokens, or fails; speculators: {WRONG_MAP}"
        yield fault(says, OFFSETS, f"{does}; draftsmith: refuses it")
    elif outside:
        says = f"d2t leads {outside} times outside the {whole} tokens"
        does = f"vllm, sglang: fails; speculators: {WRONG_MAP}; draftsmith: refuses it"
        yield fault(says, "it is another target's, or damaged: restore it", does)
    elif len(ids_D.unique()) < rows:
        does = f"speculators: {WRONG_MAP}; draftsmith: refuses it"
        yield fault("d2t leads twice to one token", "restore it", does)
    elif rows == whole and bool(d2t_D.any()):
        says = "a d2t that moves tokens, for a whole vocabulary"
        does = "vllm, draftsmith: refuses it; sglang: proposes other tokens"
        yield fault(says, "drop d2t and t2d", does)
    elif rows == whole:
        yield fault("a d2t for a whole vocabulary", "drop d2t and t2d", "vllm: refuses it")
    elif t2d_V is None:
        say, needs = fault, "fails to load it"
        if case.layout != "speculators":
            say, needs = warning, "needs it"
        yield say("no t2d", "`python -m draftsmith export` adds it", f"speculators: {needs}")
    elif t2d_V.nonzero().flatten().tolist() != ids_D.sort().values.tolist():
        mend = "make t2d anew, True at the ids of d2t: `python -m draftsmith export` does"
        does = "speculators: trains on with the wrong rows; draftsmith: goes by d2t"
        yield fault("t2d and d2t name different tokens", mend, does)


def norms(case: Case) -> Iterator[Finding]:
    """Norm flags against norm tensors, and what the readers make of a missing flag."""
    config = (case.config.get("eagle_config") or {}) | case.config
    for flag, prefix in (("fc_norm", "fc_norm."), ("norm_before_fc", "input_norm.")):
        has = any(name.startswith(prefix) for name in case.names)
        if has and not config.get(flag):
            says, mend = f"{prefix}* in the file, and {flag} isn't set", f"write {flag}: true"
            does = "vllm: refuses it; sglang: skips the norm, without a word"
            yield fault(says, mend, f"{does}; speculators: skips the norm with a warning")
        if config.get(flag) and not has:
            says = f"{flag} is set, and there is no {prefix}* in the file"
            does = "vllm, sglang, speculators: runs it with norms as they are born"
            yield fault(says, f"write {flag}: false, or restore the tensors", does)
    if case.layout == "speculators" and "norm_before_residual" not in case.raw:
        does = "vllm: takes it for true; speculators, draftsmith: takes it for false"
        mend = "write what it was trained with"
        yield fault("norm_before_residual isn't written", mend, does)


def readers(case: Case) -> Iterator[Finding]:
    """What one server's loader lacks, ignores or calls otherwise."""
    if "sliding_attention" in (case.config.get("layer_types") or []):
        says = f"its layer sees {case.config.get('sliding_window')} tokens back"
        does = "sglang: sees all, unless --speculative-draft-window-size says so"
        does += "; draftsmith: sees all: beyond that acceptance may fall"
        yield warning(says, "serve it with vLLM", does)
    if case.layout == "speculators":
        verifier = (case.raw.get("speculators_config") or {}).get("verifier") or {}
        if not verifier.get("name_or_path"):
            mend = "write the target's, or `python -m draftsmith export to=speculators`"
            does = "speculators: fails; vllm: doesn't know the target"
            yield fault("verifier.name_or_path isn't written", mend, does)
        kind = (case.raw.get("transformer_layer_config") or {}).get("model_type")
        if kind not in EAGLE3_NAMES:
            says = f"transformer_layer_config has model_type {kind!r}"
            mend = f"write {' or '.join(EAGLE3_NAMES)}, whichever it is"
            yield fault(says, mend, "vllm, draftsmith: refuses it")
    if case.layout == "eagle1":
        return
    ids = case.ids[0] or case.ids[1]
    if reason := unread_by_llama_cpp(case.config | {IDS: ids}):
        does = "gguf: drafts wrongly without a word, or refuses it"
        yield warning(f"not for {STACKS['gguf'].name}: {reason}", "serve it with vLLM", does)
    if case.layout != "eagle3":
        return
    kept = case.config | {"num_hidden_layers": 1, IDS: ids}
    named = (case.raw.get("architectures"), case.raw.get("model_type"))
    if any("q_norm" in name for name in case.names) and named != ([EAGLE3_NAMES["qwen3"]], "qwen3"):
        yield fault(
            f"norms on queries and keys, under the name {named[0]} ({named[1]})",
            f"write {EAGLE3_NAMES['qwen3']} and qwen3; `python -m draftsmith export to=vllm` does",
            "vllm: refuses it; sglang: skips the norms, without a word",
        )
    if reason := unread_by_sglang(kept, case.target_layers):
        does = "sglang: drafts wrongly, without a word"
        yield warning(f"not for {STACKS['sglang'].name}: {reason}", "serve it with vLLM", does)
    if int(case.config.get("num_hidden_layers", 1)) < 2:
        return
    to, born = "`python -m draftsmith export to=", "runs with a norm as it is born"
    if any(re.search(r"layers\.[1-9]\d*\.hidden_norm", t) for t in case.checkpoint.file_of):
        yield warning("layers.1.hidden_norm, SGLang's name", f"{to}vllm`", f"vllm: {born}")
    else:
        does = f"sglang: {born}, without a word"
        yield warning("layers.1.input_layernorm, vLLM's name", f"{to}sglang`", does)


def tied(case: Case) -> Iterator[Finding]:
    """An LM head of its own."""
    if case.config.get("tie_word_embeddings"):
        mend = "write false: the head's LM head, or the target's, isn't the embedding"
        does = "sglang: takes the embeddings for the LM head; vllm: may do the same"
        yield fault("tie_word_embeddings is true", mend, does)


def rotary(case: Case) -> Iterator[Finding]:
    """Both generations of rotary fields, saying the same."""
    config, now = case.config, case.config.get("rope_parameters")
    if now and case.layout == "speculators":
        return  # its readers have transformers 5
    theta = rope_parameters(config)["rope_theta"]
    if not now:
        says = "only the rotary fields of before transformers 5"
        says = says if "rope_theta" in config else "no rotary fields: 10,000"
        mend = "write rope_parameters beside rope_theta; `python -m draftsmith export` does"
        yield warning(says, mend)
    elif "rope_theta" not in config:
        does = "vllm, sglang: before transformers 5, turns by 10,000"
        yield warning("only rope_parameters", f"write rope_theta: {theta} beside it", does)
    else:
        scaling, given = config.get("rope_scaling") or {}, config["rope_theta"]
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if given != theta or kind != now.get("rope_type", "default"):
            says = f"rope_theta {given} and rope_scaling {kind} beside rope_parameters {now}"
            does = "vllm: reads one or the other, by its version; sglang: reads rope_parameters"
            yield fault(says, "write what it was trained with into both", does)


def biases(case: Case) -> Iterator[Finding]:
    """Biases that a server has no place for, or makes up."""
    config, bias, first = case.config, "fc.bias" in case.names, case.layout == "eagle1"
    invented = "gives the attention biases that nothing fills"
    if config.get("bias"):
        mend = "write false: `python -m draftsmith export` does"
        yield (warning if first else fault)("bias is true", mend, f"vllm, sglang: {invented}")
    has = any(re.search(r"self_attn\..*_proj\.bias", name) for name in case.names)
    if has != bool(config.get("attention_bias")):
        says = "attention_bias is set, and there are no such biases in the file"
        says = "biases of the attention, and attention_bias isn't set" if has else says
        mend = f"write attention_bias: {str(has).lower()}, or restore the tensors"
        does = f"vllm: {'refuses it' if has else invented}; draftsmith: refuses it"
        yield fault(says, mend, f"{does}; sglang: has none: it skips them, without a word")
    if not first:
        if bias:
            does = "vllm, draftsmith: refuses it; sglang: skips it, unless bias"
            yield fault("fc.bias", "drop it, if zero", does)
        return
    if not bias:
        mend = "`export to=sglang` writes a zero one"
        yield warning("no fc.bias", mend, "sglang: adds a random one")
    elif bool(case.value("fc.bias").any()):
        yield warning("fc.bias isn't zero", "serve it with SGLang", "vllm: doesn't add it")
    if (named := case.raw.get("architectures")) != [EAGLE1_OF_SGLANG]:
        mend = "`python -m draftsmith export to=sglang`"
        yield warning(f"architectures {named}", mend, f"sglang: wants {EAGLE1_OF_SGLANG}")


def path_name(case: Case) -> Iterator[Finding]:
    """vLLM guesses the method from the path."""
    if case.layout == "speculators":
        return
    method = about(case.layout).stacks["vllm"].method
    part = "eagle-" if method == "eagle" else method
    if part not in str(case.folder.resolve()).lower():
        mend = f'pass "method": "{method}" in --speculative-config'
        does = "vllm: takes it for a draft LM, unless the method is given"
        yield warning(f"the path has no {part!r} in it", mend, does)


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
OF_3 = ("layer ids", "draft vocabulary", "norm flags")
EAGLE1 = {name: check for name, check in EAGLE3.items() if name not in OF_3}
