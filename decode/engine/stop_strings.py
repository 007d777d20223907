"""The text of a growing answer, and the stop strings in it.

Tokens arrive a few at a time and characters may span them, so text is read through a window: the
tokens read last, which fix the spacing at the seam, and those not yet read. What comes out doesn't
depend on how many tokens arrive at once: a stop string ends an answer at the first token after
which the text holds it, drafted or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what bytes decode to that don't make a character, or not yet


@dataclass
class AnswerText:
    """text: of the tokens read; taken: how many tokens have arrived; shown: how many characters
    have been handed out.
    """

    tokenizer: PreTrainedTokenizerBase
    stop: tuple[str, ...] = ()
    text: str = ""
    taken: int = 0
    shown: int = 0
    _window: list[int] = field(default_factory=list)  # its first _context tokens are read
    _context: int = 0

    @property
    def broken(self) -> bool:
        """Whether a stop string holds what bytes decode to that are no character. What those are
        may change with each token: all the text is then read anew, and handed out at the end.
        """
        return any(UNFINISHED in stop for stop in self.stop)

    def add(self, tokens: Sequence[int]) -> int | None:
        """Take in an answer's next tokens. Returns None, or how many of them to keep: up to and
        including the one that completes a stop string; nothing may be added then.
        """
        if not tokens:
            return None
        start = max(0, len(self.text) + 1 - max(map(len, self.stop), default=1))
        new = self._decode([*self._window, *tokens])
        # Bytes that aren't a character yet may hide a stop string that one token fewer shows.
        whole = not self.stop or (UNFINISHED not in new and not self.broken)
        if whole and not self._stopped(self.text[start:] + new):
            self._take(tokens, new)
            return None
        for count, token in enumerate(tokens, 1):
            new = self._decode([*self._window, token])
            if self._stopped(self.text[start:] + new):
                return count
            self._take([token], new)
        return None

    def next_piece(self) -> str:
        """The text to hand out now: all but an ending that may turn out to begin a stop string."""
        end = len(self.text) - held_back(self.text, self.stop)
        piece = self.text[self.shown : end]
        self.shown = end
        return piece

    def _stopped(self, text: str) -> bool:
        return any(stop in text for stop in self.stop)

    def _decode(self, window: list[int]) -> str:
        """The text of a window after its context."""
        before = self.tokenizer.decode(self._window[: self._context])
        return str(self.tokenizer.decode(window))[len(before) :]

    def _take(self, tokens: Sequence[int], new: str) -> None:
        self._window += tokens
        self.taken += len(tokens)
        if not (self.broken or new.endswith(UNFINISHED)):
            self.text += new
            self._window = self._window[self._context :]
            self._context = len(self._window)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text up to the first stop string in it; all of it without one."""
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=len(text))]


def held_back(text: str, stop: Sequence[str]) -> int:
    """Length of the longest ending of the text that begins a stop string."""
    lengths = range(min(len(text), max(map(len, stop), default=1) - 1), 0, -1)
    return next((n for n in lengths if any(s.startswith(text[-n:]) for s in stop)), 0)
