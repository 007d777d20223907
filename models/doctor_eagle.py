"""The doctor's checks of EAGLE-1 and EAGLE-3 heads, flat or in speculators' format.

Each is a function of a case that yields the problems it finds. What servers do is read from their
loaders.

Shapes: V rows of the target's LM head, D draft vocabulary, H hidden.
"""

import re
from collections.abc import Iterator

import torch

from draftsmith.models.eagle import EAGLE3_NAMES
from draftsmith.models.findings import Case, Check, Problem, fault, warning
from draftsmith.models.imports import rope_parameters
from draftsmith.models.serve import unread_by_sglang

RANDOM = "leaves the layer random, without a word"
REFUSES = "refuses it"
OFFSETS = "write offsets, id - position: `python -m draftsmith export` does"
IDS = "eagle_aux_hidden_state_layer_ids"


def tensors(case: Case) -> Iterator[Problem]:
    """Missing, unknown and misshapen tensors, apart from those that have a check of their own."""
    found = {name: tuple(case.checkpoint.meta[t].shape) for name, t in case.names.items()}
    wanted = _shapes(case)
    own = ("fc.weight", "fc.bias", "lm_head.weight", "d2t", "t2d", "input_norm.weight")
    missing = sorted(wanted.keys() - found.keys())
    unknown = [n for n in found if n not in wanted and n not in own and "fc_norm" not in n]
    unknown = [n for n in unknown if not re.fullmatch(r"layers\.\d+\..*_proj\.bias", n)]
    odd = [n for n in wanted.keys() & found.keys() if wanted[n] != found[n]]
    if missing:
        yield fault(
            f"{len(missing)} missing: {', '.join(missing[:3])}",
            "take the folder from where it was whole; train again",
            vllm_sglang_speculators=RANDOM,
            draftsmith=REFUSES,
        )
    if unknown:
        yield fault(
            f"{len(unknown)} without a place: {', '.join(sorted(unknown)[:3])}",
            "rename them as the others are, or drop them",
            vllm_draftsmith=REFUSES,
            sglang="skips them, and leaves random what they were for, without a word",
            speculators="skips them with a warning",
        )
    if odd:
        name = sorted(odd)[0]
        yield fault(
            f"{name} is {list(found[name])}, its config makes it {list(wanted[name])}",
            "config.json and weights are of two heads: restore them",
            vllm_sglang_speculators_draftsmith=REFUSES,
        )
    if case.layout == "speculators" and any("midlayer." in t for t in case.checkpoint.file_of):
        yield fault(
            "tensors called midlayer.* in speculators' format, whose name is layers.0.*",
            "python -m draftsmith export to=speculators writes the names it reads",
            speculators=RANDOM + " but a load report",
        )


def _shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """The tensors of the layers and the final norm that the config asks for."""
    config, eagle1 = case.config, case.layout == "eagle1"
    H, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or H // heads)
    keys = int(config.get("num_key_value_heads") or heads) * width
    made: dict[str, tuple[int, ...]] = {} if eagle1 else {"norm.weight": (H,)}
    for index in range(int(config.get("num_hidden_layers", 1))):
        first = index == 0
        entry = 2 * H if first and not eagle1 else H
        norms = ["post_attention_layernorm"]
        norms += ["input_layernorm"] if not (first and eagle1) else []
        norms += ["hidden_norm"] if first and not eagle1 else []
        part: dict[str, tuple[int, ...]] = {f"{norm}.weight": (H,) for norm in norms}
        part |= {f"self_attn.{n}_proj.weight": (keys, entry) for n in "kv"}
        part |= {"self_attn.q_proj.weight": (heads * width, entry)}
        part |= {"self_attn.o_proj.weight": (H, heads * width)}
        part |= {f"mlp.{n}_proj.weight": (inner, H) for n in ("gate", "up")}
        part |= {"mlp.down_proj.weight": (H, inner)}
        if any("q_norm" in name for name in case.names):
            part |= {f"self_attn.{n}_norm.weight": (width,) for n in "qk"}
        made |= {f"layers.{index}.{name}": shape for name, shape in part.items()}
    return made


def layer_ids(case: Case) -> Iterator[Problem]:
    """Which layers of the target are tapped, in vLLM's and in SGLang's convention."""
    top = case.config.get(IDS)
    nested = (case.config.get("eagle_config") or {}).get(IDS)
    layers, flat = case.target_layers, case.layout == "eagle3"
    usual = [2, layers // 2, layers - 3] if layers else None
    mend = f"write {IDS} at the top level (layers already run) and in eagle_config (that - 1)"
    if not top and not nested:
        yield warning(
            "no layers named: every server takes 2, n // 2, n - 3",
            f"right if it was trained on them; {mend}",
        )
        return
    by_nested = [i + 1 for i in nested] if nested else None
    if flat and not top and by_nested != usual:
        yield fault(
            f"only the nested ids, {nested}",
            mend,
            vllm="doesn't read them: taps 2, n // 2, n - 3, and accepts next to nothing",
        )
    if flat and not nested and top != usual:
        yield fault(
            f"only the top-level ids, {top}",
            mend,
            sglang="doesn't read them: taps 2, n // 2, n - 3, and accepts next to nothing",
        )
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


def fc(case: Case) -> Iterator[Problem]:
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


def vocabulary(case: Case) -> Iterator[Problem]:
    """The draft vocabulary: its size, its LM head, and the maps to the target's tokens."""
    said, whole = case.config.get("draft_vocab_size"), case.config.get("vocab_size")
    head = case.meta("lm_head.weight")
    if head is None:
        takes = "takes the target's rows, without a word"
        yield fault("no lm_head.weight", "restore it", sglang=RANDOM, speculators=takes)
        return
    rows = head.shape[0]
    if said is None:
        fails = "fails on the missing field"
        yield fault("no draft_vocab_size", f"write {rows}", sglang=fails, vllm="takes vocab_size")
    elif said != rows:
        says = f"draft_vocab_size is {said}, lm_head.weight has {rows} rows"
        yield fault(says, f"write {rows}, if d2t has as many", vllm_sglang_speculators=REFUSES)
    if whole is None:
        yield warning("no vocab_size", "write the target's into config.json")
    elif "d2t" in case.names:
        yield from _maps(case, rows, int(whole))
    elif rows < whole:
        yield fault(
            f"no d2t, though it drafts {rows} of {whole} tokens",
            OFFSETS if "t2d" in case.names else "restore it",
            vllm_sglang="takes draft ids for the target's",
            speculators="fails",
        )


def _maps(case: Case, rows: int, whole: int) -> Iterator[Problem]:
    d2t_D = case.value("d2t").long()
    ids_D = d2t_D + torch.arange(len(d2t_D))
    t2d_V = case.value("t2d").bool() if "t2d" in case.names else None
    outside = int(((ids_D < 0) | (ids_D >= whole)).sum())
    if len(d2t_D) != rows:
        says = f"d2t has {len(d2t_D)} entries for {rows} rows"
        yield fault(says, "restore it", vllm_sglang_speculators_draftsmith=REFUSES)
    elif (
        outside and bool((d2t_D.diff() > 0).all()) and 0 <= int(d2t_D[0]) <= int(d2t_D[-1]) < whole
    ):
        yield fault(
            f"d2t holds ids, not offsets: its last entry leads to {int(ids_D[-1])} of {whole}",
            OFFSETS,
            vllm_sglang="proposes other tokens, or fails",
            draftsmith=REFUSES,
        )
    elif outside:
        says = f"d2t leads {outside} times outside the {whole} tokens"
        mend = "it is another target's, or damaged: restore it"
        yield fault(says, mend, vllm_sglang="fails", draftsmith=REFUSES)
    elif len(ids_D.unique()) < rows:
        yield fault("d2t leads twice to one token", "restore it", draftsmith=REFUSES)
    elif rows == whole and bool(d2t_D.any()):
        says = "a d2t that moves tokens, for a whole vocabulary"
        yield fault(says, "drop d2t and t2d", sglang="proposes other tokens")
    elif t2d_V is None and rows < whole:
        yield warning("no t2d", "`python -m draftsmith export` adds it", speculators="needs it")
    elif t2d_V is not None and t2d_V.nonzero().flatten().tolist() != ids_D.sort().values.tolist():
        yield fault(
            "t2d and d2t name different tokens",
            "make t2d anew, True at the ids of d2t: `python -m draftsmith export` does",
            speculators="trains on with the wrong rows",
            draftsmith="goes by d2t",
        )


def norms(case: Case) -> Iterator[Problem]:
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


def readers(case: Case) -> Iterator[Problem]:
    """What one server's loader lacks or calls otherwise: norms on queries and keys, further layers,
    and what SGLang ignores.
    """
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
    reason = unread_by_sglang(kept, layers=case.target_layers)
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


def tied(case: Case) -> Iterator[Problem]:
    """An LM head of its own."""
    if case.config.get("tie_word_embeddings"):
        yield fault(
            "tie_word_embeddings is true",
            "write false: the head's LM head, or the target's, isn't the embedding",
            sglang="takes the embeddings for the LM head",
            vllm="may do the same",
        )


def rotary(case: Case) -> Iterator[Problem]:
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


def biases(case: Case) -> Iterator[Problem]:
    """Biases that a server has no place for, or makes up."""
    config, bias = case.config, "fc.bias" in case.names
    invented = "gives the attention biases that nothing fills"
    if config.get("bias"):
        say = warning if case.layout == "eagle1" else fault
        mend = "write false: `python -m draftsmith export` does"
        yield say("bias is true", mend, vllm_sglang=invented)
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
    if case.raw.get("architectures") != ["LlamaForCausalLMEagle"]:
        yield warning(
            f"architectures {case.raw.get('architectures')}",
            "`python -m draftsmith export to=sglang`",
            sglang="wants LlamaForCausalLMEagle",
        )


def path_name(case: Case) -> Iterator[Problem]:
    """vLLM guesses the method from the path."""
    part, method = ("eagle-", "eagle") if case.layout == "eagle1" else ("eagle3", "eagle3")
    if part not in str(case.folder.resolve()).lower() and case.layout != "speculators":
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
    for name in ("tensors", "fc", "own LM head", "rotary fields", "biases", "path name")
}
