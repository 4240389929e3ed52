"""From token ids to text, piece by piece: no half character is shown, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

REPLACEMENT = "\ufffd"


class _SoFar(NamedTuple):
    """What a detokenizer has made of its tokens.

    Attributes:
        taken: tokens. window: where the piece that is decoded begins; read: how far it was whole.
        text: all of it, of which `shown` characters may be seen. stopped: whether a stop string was there.
    """

    taken: int = 0
    window: int = 0
    read: int = 0
    text: str = ""
    shown: int = 0
    stopped: bool = False


class Detokenizer:
    """Text of one growing sequence of tokens.

    A token may hold only part of a character, and a tokenizer may treat a first token differently (SentencePiece drops
    its space), so tokens cannot be decoded one by one. Each addition decodes a short window twice, without and with the
    new tokens; the difference is new text. The window starts at the last place where text was whole. (The two-offset
    scheme is that of Hugging Face's text-generation-inference.)

    Args:
        tokenizer: anything with `decode(ids, skip_special_tokens=...) -> str`.
        stop: strings that end the text, which is cut before them. Of several, the one that is whole first counts; of
            those that end together, the longest.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._stop, self._skip = tokenizer, tuple(stop), skip_special_tokens
        self._ids: list[int] = []
        self._so_far = _SoFar()

    @property
    def text(self) -> str:
        """All text that may be shown so far."""
        return self._so_far.text[: self._so_far.shown]

    @property
    def stopped(self) -> bool:
        """Whether a stop string is there."""
        return self._so_far.stopped

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far."""
        return self._so_far.taken

    def add(self, ids: Sequence[int], may_stop: bool = True) -> str:
        """Take tokens; returns the text that may now be shown. `stopped` then says whether a stop string is there.

        A stop string that is whole only now is passed over if `may_stop` is False, and is text like any other. A call
        that breaks off has taken nothing.
        """
        taken, window, read, text, _, stopped = self._so_far
        self._ids[taken:] = ids
        taken = len(self._ids)
        before = self._decode(window, read)
        after = self._decode(window, taken)
        if len(after) > len(before) and not after.endswith(REPLACEMENT):
            text, found = self._append(text, after[len(before) :], may_stop)
            window, read, stopped = read, taken, stopped or found
        return self._show(taken, window, read, text, stopped, 0 if stopped else self._held_back(text))

    def finish(self) -> str:
        """No more tokens will come: returns the rest of the text, unfinished characters as replacement marks."""
        taken, window, read, text, _, stopped = self._so_far
        if not stopped and read < taken:
            before = self._decode(window, read)
            text, stopped = self._append(text, self._decode(window, taken)[len(before) :])
            read = taken
        return self._show(taken, window, read, text, stopped, 0)

    def _decode(self, start: int, end: int) -> str:
        if start == end:
            return ""
        return str(self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip))

    def _append(self, text: str, new: str, may_stop: bool = True) -> tuple[str, bool]:
        """The text with what is new, cut before a stop string that is whole now; and whether there is one."""
        size = len(text)
        text += new
        # A match may begin in text that is there already, but ends in what is new. The one that is whole first wins, so
        # that the text does not depend on how it was cut into tokens.
        starts = ((stop, text.find(stop, max(size - len(stop) + 1, 0))) for stop in self._stop)
        found = [(at + len(stop), at) for stop, at in starts if at >= 0]
        return (text[: min(found)[1]], True) if found and may_stop else (text, False)

    def _held_back(self, text: str) -> int:
        """Length of the longest end of the text that could be the beginning of a stop string."""
        return max(
            (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )

    def _show(self, taken: int, window: int, read: int, text: str, stopped: bool, hold: int) -> str:
        start = self._so_far.shown
        shown = max(start, len(text) - hold)
        # All at once, so that a call that breaks off leaves no half of it.
        self._so_far = _SoFar(taken, window, read, text, shown, stopped)
        return text[start:shown]
