"""The errors of the three notes that the book grew from, each with a check that runs.

A check is a function: it carries what the note says, its docstring says what holds, its body asserts that, and it
returns one line of what it found. The page is made of these by `book/_ext/errata.py` at every build, and
`tests/test_errata.py` runs them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

NOTES = {"A": [], "B": [], "C": []}


@dataclass(frozen=True)
class Erratum:
    """One error: the note's lines, its words and their translation, how grave it is, and the check.

    Grave "A" misleads a reader or breaks code, "B" is imprecise.
    """

    note: str
    lines: str
    words: str
    meaning: str
    grave: str
    check: Callable[[], str]


def erratum(note, lines, words, meaning, grave="A"):
    """Enter the decorated check into the list of its note."""

    def enter(check):
        NOTES[note].append(Erratum(note, lines, words, meaning, grave, check))
        return check

    return enter


def draw(*shape, seed=0):
    """Reproducible normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(T, K, V, seed=0):
    """Queries, keys and values of one head, `[1, T, 1, K or V]`."""
    return tuple(draw(1, T, 1, D, seed=3 * seed + i) for i, D in enumerate((K, K, V)))


from book.errata import note_a, note_b, note_c  # noqa: F401
