"""Two tokenizers: which of their tokens are the same, and texts in one or the other."""

import codecs
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from draftsmith.models.tokenizer import special_ids, token_bytes

NEAR = 16  # bytes of text that tokens are made after


class Spelling:
    """A tokenizer's tokens as bytes. bytes_of: what each id adds to a text; ids: of bytes the
    lowest ordinary id that adds them; special: content -> id, of tokens that are no text; ends: the
    ids that begin and end a text, None where there is none.

    Bytes, and not the pieces of a vocabulary file: these spell a space as a letter of their own,
    and a byte by its number or by another letter.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        special = special_ids(tokenizer)
        by_id = sorted((i, name) for name, i in tokenizer.get_vocab().items())
        self.special = {name: i for i, name in by_id if i in special}
        self.bytes_of = {
            i: name.encode() if i in special else token_bytes(i, tokenizer) or b""
            for i, name in by_id
        }
        self.ids: dict[bytes, int] = {}
        for i, piece in self.bytes_of.items():
            if piece and i not in special:
                self.ids.setdefault(piece, i)
        self.ends = tokenizer.bos_token_id, tokenizer.eos_token_id

    def after(self, before: bytes, text: bytes) -> list[int]:
        """The tokens of a text that follows another, of which the last bytes will do: as both are
        tokenised together, if a token begins where the text does, else as it is tokenised alone.
        What there is of an unfinished character at the end becomes tokens of single bytes, where
        there are such.
        """
        if not text:
            return []
        cut = max(0, whole(before + text) - len(before))
        for known in (before, b""):
            said = (known + text[:cut]).decode(errors="replace")
            ids = self.tokenizer.encode(said, add_special_tokens=False)
            # From the end: at its beginning a tokenizer may add a space.
            first, left = len(ids), cut
            while left > 0 and first:
                first -= 1
                left -= len(self.bytes_of[ids[first]])
            if left == 0:
                break
        singles = (self.ids.get(text[i : i + 1]) for i in range(cut, len(text)))
        return ids[first:] + [i for i in singles if i is not None]


def whole(text: bytes) -> int:
    """How many of a text's bytes are left without an unfinished character at its end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text)
    return len(text) - len(decoder.getstate()[0])


@dataclass(frozen=True)
class VocabMap:
    """Target id -> draft id of the same token, one to one. ordinary: by their bytes, of tokens with
    the same bytes the lowest id; special: by their content, else those that begin and end a text.
    """

    ordinary: dict[int, int]
    special: dict[int, int]

    @classmethod
    def of(cls, draft: Spelling, target: Spelling) -> "VocabMap":
        ordinary = {i: draft.ids[piece] for piece, i in target.ids.items() if piece in draft.ids}
        names = target.special.items()
        special = {i: draft.special[name] for name, i in names if name in draft.special}
        for theirs, own in zip(target.ends, draft.ends, strict=True):
            given = theirs in special or own in special.values()
            if theirs is not None and own is not None and not given:
                special[theirs] = own
        return cls(ordinary, special)
