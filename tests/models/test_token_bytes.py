"""The bytes of one token, whatever the tokenizer spells them with."""

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from draftsmith.models.tokenizer import stand_in_tokenizer, token_bytes


def test_of_byte_fallback_and_leading_spaces() -> None:
    """As Llama 2's: a decoder that strips the space in front of a text."""
    vocab = {"<unk>": 0, "▁the": 1, "<0xE2>": 2, "a": 3, "<0x0A>": 4}
    made = Tokenizer(BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    found = [token_bytes(token, tokenizer) for token in range(5)]
    assert found == [b"<unk>", b" the", b"\xe2", b"a", b"\n"]


def test_of_byte_level_tokens() -> None:
    tokenizer = stand_in_tokenizer(300)
    text = "€ and ü\n\ud7ff!"
    tokens = tokenizer(text).input_ids
    assert b"".join(token_bytes(token, tokenizer) or b"?" for token in tokens) == text.encode()
    assert [b for t in range(261) if (b := token_bytes(t, tokenizer)) == b"\xe2"] == [b"\xe2"]


def test_of_a_tokenizer_that_does_not_say() -> None:
    made = Tokenizer(BPE({"\ufffd": 0, "a": 1}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    assert token_bytes(0, tokenizer) is None
