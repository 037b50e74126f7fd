"""Tokens to text, one piece at a time, and stop strings."""

from typing import Any

_UNFINISHED = "\ufffd"
_LONGEST_CHARACTER = 8  # tokens; what is unfinished after so many is not going to be a character
_CONTEXT_TOKENS = 4


class TextStream:
    """Turns a growing list of token ids into text deltas; holds back what may still become a stop string."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._hold = max((len(word) for word in stop), default=1) - 1
        self._ids: list[int] = []
        self._read = 0  # tokens whose text is final
        self._text = ""
        self._sent = 0
        self.stopped = False

    def push(self, token: int) -> None:
        """Add one token; sets ``stopped`` when its text completes a stop string."""
        self._ids.append(token)
        piece = self._unread()
        if piece.endswith(_UNFINISHED) and len(self._ids) - self._read < _LONGEST_CHARACTER:
            return
        start = max(0, len(self._text) - self._hold)
        self._text += piece
        self._read = len(self._ids)
        found = [at for at in (self._text.find(word, start) for word in self._stop) if at >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True

    def take(self, *, final: bool) -> str:
        """Return the text that is certain and not yet taken."""
        if final and not self.stopped and self._read < len(self._ids):
            self._text += self._unread()
            self._read = len(self._ids)
        end = len(self._text) if final or self.stopped else max(self._sent, len(self._text) - self._hold)
        piece = self._text[self._sent : end]
        self._sent = end
        return piece

    def _unread(self) -> str:
        """Text of the tokens not read yet; decoded after a few that were, since spaces depend on what is before."""
        context = max(0, self._read - _CONTEXT_TOKENS)
        before = self._tokenizer.decode(self._ids[context : self._read])
        return str(self._tokenizer.decode(self._ids[context:])[len(before) :])
