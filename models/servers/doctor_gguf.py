"""The doctor's check of a draft LM's vocabulary and of what llama.cpp's converter reads, by
common/speculative.cpp and conversion/ of llama.cpp. Older servers compare ids of bos and eos even
where neither is added to a prompt, so these are compared always.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from draftsmith.models.disk.read_lm import load_config, read_json
from draftsmith.models.server_facts import GGUF_EAGLE3, GGUF_SIZES, GGUF_TEXTS
from draftsmith.models.servers.findings import Case, Finding, fault, warning
from draftsmith.models.tokenizer import load_tokenizer, vocab_size

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
COPY = "copy the target's tokenizer files into the folder, byte for byte"


class Vocabulary(NamedTuple):
    """What a GGUF file says of a tokenizer. kind: how it splits; ends: of bos and eos the id, and
    whether it is added to a prompt; texts: by id, as many as logits, None past the tokenizer's.
    """

    kind: str
    ends: dict[str, tuple[int | None, bool]]
    texts: list[str | None]


def vocabulary(tokenizer: PreTrainedTokenizerBase, config: Any, path: Path) -> Vocabulary:
    """Of a tokenizer, the text config of its model, and the folder of both: the converter goes by
    flags in tokenizer_config.json that transformers may pass over.
    """
    file = path / "tokenizer_config.json"
    flags = read_json(file) if file.is_file() else {}
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", tokenizer)
    bytes_too = " with byte fallback" if getattr(model, "byte_fallback", False) else ""
    bare, whole = (tokenizer("a", add_special_tokens=on).input_ids for on in (False, True))
    ends = {}
    for end, at in (("bos", 0), ("eos", -1)):
        known = getattr(tokenizer, f"{end}_token_id")
        said = flags.get(f"add_{end}_token")
        added = said if isinstance(said, bool) else whole[at] != bare[at]
        ends[end] = (getattr(config, f"{end}_token_id", None) if known is None else known, added)
    ids = range(min(config.vocab_size, vocab_size(tokenizer)))
    texts = [*tokenizer.convert_ids_to_tokens(list(ids))]
    return Vocabulary(
        type(model).__name__ + bytes_too, ends, texts + [None] * (config.vocab_size - len(ids))
    )


def llama_cpp(case: Case) -> Iterator[Finding]:
    """What its converter takes otherwise or lacks, then the four rules for two vocabularies."""
    if GGUF_EAGLE3 in case.raw and case.raw.get("num_hidden_layers") == 1:
        says = f"{GGUF_EAGLE3} in the config.json of a draft LM of one layer"
        yield warning(says, "drop the key", "gguf: its converter takes it for an EAGLE-3 head")
    heads = [t.shape[0] for n, t in case.checkpoint.meta.items() if n.endswith("lm_head.weight")]
    rows = (case.raw.get("text_config") or case.raw).get("vocab_size")
    if heads and rows and heads[0] != rows:
        says = f"an LM head of {heads[0]} rows for {rows} tokens"
        does = "gguf, draftsmith: refuses it: a draft LM's head can't be trimmed in its file"
        yield fault(says, "restore the whole head", does)
    if not any((case.folder / name).is_file() for name in VOCABULARIES):
        does = "gguf, mlx: its converter fails; draftsmith: refuses it"
        yield fault("no tokenizer files in the folder", COPY, does)
        return
    theirs = Path(case.target_path) / "tokenizer.model"
    if theirs.is_file() and not (case.folder / theirs.name).is_file():
        does = "gguf: its converter fails, or makes another kind of vocabulary"
        yield warning(f"no {theirs.name}, which the target has", COPY, does)
    if case.tokenizer is None:
        return
    config = load_config(case.folder).get_text_config()
    draft = vocabulary(load_tokenizer(case.folder), config, case.folder)
    target = vocabulary(case.tokenizer, case.target_config, Path(case.target_path))
    refuses = "gguf, lmstudio: refuses it as the target's draft"
    if draft.kind != target.kind:
        says = f"a tokenizer of kind {draft.kind}, the target's {target.kind}"
        yield warning(says, COPY, refuses)
    for end, (own, added) in draft.ends.items():
        its, adds = target.ends[end]
        if own != its:
            yield warning(f"{end} id {own}, the target's {its}", COPY, refuses)
        if added != adds:
            says = f"its tokenizer adds {end if added else f'no {end}'} to a prompt"
            yield warning(f"{says}, unlike the target's", COPY, refuses)
    sizes = len(draft.texts), len(target.texts)
    if abs(sizes[0] - sizes[1]) > GGUF_SIZES:
        says = f"{sizes[0]} tokens, the target's {sizes[1]}: more than {GGUF_SIZES} apart"
        yield warning(says, f"train it with vocab_size={sizes[1]}", refuses)
    pairs = [*zip(draft.texts, target.texts, strict=False)][GGUF_TEXTS:]
    other = [(i, *pair) for i, pair in enumerate(pairs, GGUF_TEXTS) if pair[0] != pair[1]]
    if other:
        token, text, wanted = other[0]
        says = (
            f"{len(other)} tokens of another text: id {token} is {text!r}, the target's {wanted!r}"
        )
        does = "vllm, sglang, transformers, tensorrt, mlx: drafts other tokens, without a word"
        yield fault(says, COPY, f"{refuses}; {does}; draftsmith: refuses it")
