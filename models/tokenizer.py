"""Tokenizers: loading, comparing two of them, and a stand-in for trials without a checkpoint.

A tokenizer and a logit width are two things. Many models pad their output head to a round number of
rows (Qwen2.5, Pythia): the rows past the tokenizer are never text, and logits are cut to
`vocab_size(tokenizer)` before anything is compared.
"""

import inspect
import json
import re
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftsmith.models.disk.read_lm import first_line, read_json

END, PAD = "<|end|>", "<|pad|>"
STAND_IN_SIZE = 500  # no multiple of 64, so that a trial also meets padded logits
ROLES = ("system", "user", "assistant")
STAND_IN_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


# Tokenizer -> its length when it was counted, and its size: counting takes 3 ms for 4,096 tokens.
_sizes: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, int]]" = (
    weakref.WeakKeyDictionary()
)


def vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of token ids: len(tokenizer), or one past the largest id where the ids have gaps."""
    tokens = len(tokenizer)
    known, size = _sizes.get(tokenizer, (-1, 0))
    if known != tokens:
        size = max(tokens, 1 + max(tokenizer.get_vocab().values(), default=-1))
        _sizes[tokenizer] = tokens, size
    return size


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that are no text, also those that have no role such as eos."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}


def load_tokenizer(path: str | Path, *, local_files_only: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or of a hub name; ValueError when it is missing or damaged."""
    folder = Path(path)
    if folder.is_dir():
        # Without this, some classes build an empty vocabulary from config.json alone.
        if not any(file.name.startswith(TOKENIZER_FILES) for file in folder.iterdir()):
            raise ValueError(
                f"got {folder} without a tokenizer; expected tokenizer.json (or the family's own "
                "vocabulary file) beside config.json; copy it there from its model"
            )
        if (folder / "tokenizer.json").exists():
            read_json(folder / "tokenizer.json")
    config = folder / "config.json"
    kind = read_json(config).get("model_type") if config.is_file() else None
    # Of a head transformers would warn that it doesn't know the type; the tokenizer's files do.
    heads = {} if kind is None or kind in CONFIG_MAPPING else {"config": PretrainedConfig()}
    try:
        return AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=local_files_only, **heads
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"got {path}, from which no tokenizer can be read ({first_line(error)}); expected "
            "tokenizer files in transformers' layout; check the path, or copy the files again"
        ) from error


def token_bytes(token: int, tokenizer: PreTrainedTokenizerBase) -> bytes | None:
    """What a token adds to a text that it doesn't begin; None where that isn't whole characters and
    the tokenizer doesn't say which bytes (byte-level tokenizers and byte fallback do).
    """
    text = str(tokenizer.decode([token, token]))[len(tokenizer.decode([token])) :]
    if "\ufffd" not in text:
        return text.encode()
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if fallback := re.fullmatch("<0x([0-9A-F]{2})>", piece):
        return bytes.fromhex(fallback[1])
    return bytes(map(BYTES.__getitem__, piece)) if BYTES.keys() >= {*piece} else None


def check_logit_width(rows: int, tokenizer: PreTrainedTokenizerBase, owner: str) -> None:
    """ValueError when `owner` has fewer logits than the tokenizer has tokens; more are padding."""
    size = vocab_size(tokenizer)
    if rows < size:
        raise ValueError(
            f"got an output head of {rows} rows in {owner} and a tokenizer of {size} tokens; "
            "expected at least one row a token; resize the model's embeddings, or use the "
            "tokenizer that it was trained with"
        )


def check_same_tokenizer(
    target_tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase
) -> None:
    """ValueError unless both give every id the same token; it names the first ids that differ. A
    draft reads and writes ids and never text, so the rest (normalisation, template, which id ends a
    text) may differ.
    """
    target = {index: token for token, index in target_tokenizer.get_vocab().items()}
    draft = {index: token for token, index in draft_tokenizer.get_vocab().items()}
    ids = sorted(target.keys() | draft.keys())
    differ = [index for index in ids if target.get(index) != draft.get(index)]
    if differ:
        target, draft = ({i: repr(t) for i, t in side.items()} for side in (target, draft))
        examples = "; ".join(
            f"id {i}: target {target.get(i, 'nothing')}, draft {draft.get(i, 'nothing')}"
            for i in differ[:4]
        )
        raise ValueError(
            f"got tokenizers that differ at {len(differ)} of {len(ids)} ids ({examples}); "
            "expected the same token at every id; take a draft that shares the target's "
            "tokenizer, or train one on it (train/distill.py with a draft built from the "
            "target's config)"
        )


def train_bpe(
    texts: Iterable[str], size: int, roles: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `size` tokens, the same for the same texts: an end and a padding token,
    one token `<|role|>` for each of `roles`, all bytes, and what merging gives; with roles also a
    chat template that marks answers. ValueError for fewer tokens than these need, or a text too
    small to give so many.
    """
    special = [END, PAD, *(f"<|{role}|>" for role in roles)]
    if size < 256 + len(special):
        raise ValueError(f"tokenizer_size: got {size}, expected at least {256 + len(special)}")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=PAD)
    if len(tokenizer) != size:
        raise ValueError(
            f"tokenizer_size: got {size}, but the text gives only {len(tokenizer)} tokens; "
            "ask for fewer, or bring more text"
        )
    tokenizer.chat_template = STAND_IN_TEMPLATE if roles else None
    return tokenizer


def numbered(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of so many tokens, each its number: where only their count matters."""
    words = models.WordLevel({str(i): i for i in range(size)}, unk_token="0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))


def stand_in_tokenizer(size: int = STAND_IN_SIZE) -> PreTrainedTokenizerFast:
    """A BPE of the interpreter's own json and inspect, with a chat template that marks answers."""
    texts = [inspect.getsource(json), inspect.getsource(inspect)]
    return train_bpe(texts, size, ROLES)


BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # byte-level spelling
TOKENIZER_FILES = ("tokenizer", "vocab", "spiece", "sentencepiece", "tekken")
