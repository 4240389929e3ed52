"""From token ids to text, piece by piece: no half character is shown, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"


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
        self._window = self._read = 0
        self._text = ""
        self._shown = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text that may be shown so far."""
        return self._text[: self._shown]

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far."""
        return len(self._ids)

    def add(self, ids: Sequence[int], may_stop: bool = True) -> str:
        """Take tokens; returns the text that may now be shown. `stopped` then says whether a stop string is there.

        A stop string that is whole only now is passed over if `may_stop` is False, and is text like any other.
        """
        self._ids.extend(ids)
        before = self._decode(self._window, self._read)
        after = self._decode(self._window, len(self._ids))
        if len(after) > len(before) and not after.endswith(REPLACEMENT):
            self._append(after[len(before) :], may_stop)
            self._window, self._read = self._read, len(self._ids)
        return self._show(self._held_back())

    def finish(self) -> str:
        """No more tokens will come: returns the rest of the text, unfinished characters as replacement marks."""
        if not self.stopped and self._read < len(self._ids):
            before = self._decode(self._window, self._read)
            self._append(self._decode(self._window, len(self._ids))[len(before) :])
            self._read = len(self._ids)
        return self._show(0)

    def _decode(self, start: int, end: int) -> str:
        if start == end:
            return ""
        return str(self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip))

    def _append(self, new: str, may_stop: bool = True) -> None:
        size = len(self._text)
        self._text += new
        # A match may begin in text that is there already, but ends in what is new. The one that is whole first wins, so
        # that the text does not depend on how it was cut into tokens.
        starts = ((stop, self._text.find(stop, max(size - len(stop) + 1, 0))) for stop in self._stop)
        found = [(at + len(stop), at) for stop, at in starts if at >= 0]
        if found and may_stop:
            self._text, self.stopped = self._text[: min(found)[1]], True

    def _held_back(self) -> int:
        """Length of the longest end of the text that could be the beginning of a stop string."""
        if self.stopped:
            return 0
        return max(
            (n for stop in self._stop for n in range(1, len(stop)) if self._text.endswith(stop[:n])),
            default=0,
        )

    def _show(self, hold: int) -> str:
        start, self._shown = self._shown, max(self._shown, len(self._text) - hold)
        return self._text[start : self._shown]
