"""Numbered footnotes: a sentence that many rows have is written once."""

from __future__ import annotations

from collections.abc import Iterator

# A prediction differs from row to row.
_INLINE = "predicted "


class Footnotes:
    """Numbers sentences in the order in which they are first used."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, sentence: str) -> str:
        """Return the mark of a sentence: ``[2]``; a prediction is returned as it is."""
        if sentence.startswith(_INLINE):
            return sentence
        return f"[{self._numbers.setdefault(sentence, len(self._numbers) + 1)}]"

    def lines(self) -> Iterator[str]:
        """Yield every sentence once, with its number."""
        for sentence, number in self._numbers.items():
            yield f"[{number}] {sentence}"
