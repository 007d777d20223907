"""Training a byte-level BPE tokenizer."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END, PAD = "<|end|>", "<|pad|>"
LEAST = 256 + 2  # all bytes, and the two special tokens


def train_bpe(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `size` tokens with an end and a padding token; a function of the texts.

    Raises:
        ValueError: fewer tokens than bytes, or a text too small to give so many.
    """
    if size < LEAST:
        raise ValueError(f"tokenizer_size: got {size}, expected at least {LEAST}")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END, PAD],
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
    return tokenizer
