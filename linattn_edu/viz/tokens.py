"""Byte tokens as labels that a reader can tell apart."""

import functools

import matplotlib
from matplotlib import font_manager

from linattn_edu.validate import describe

VISIBLE = {" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"}


def token_labels(tokens):
    """One short label a token: `the cat` gives `t h e ␣ c a t`.

    `tokens` is bytes, a string (its UTF-8 bytes), byte values 0 to 255 (a list or a tensor), or a list of strings. A
    character of several bytes labels its first byte, `·` each further one; bytes that are no character, or one that
    no font here can draw, are shown in hexadecimal.
    """
    if isinstance(tokens, str):
        tokens = tokens.encode()
    if not isinstance(tokens, bytes):
        try:
            tokens = list(tokens)
            if all(isinstance(token, str) for token in tokens):
                return ["".join(VISIBLE.get(c, c) for c in token) for token in tokens]
            tokens = bytes(tokens)
        except (TypeError, ValueError):
            expected = "bytes, a string, numbers from 0 to 255 or strings"
            raise ValueError(f"`tokens`: got {describe(tokens)}, expected {expected}") from None
    labels = []
    while len(labels) < len(tokens):
        labels += _character(tokens[len(labels) : len(labels) + 4])
    return labels


def token_fonts():
    """The families for such labels: in a monospaced font I and l differ."""
    return ["DejaVu Sans Mono", *matplotlib.rcParams["font.family"]]


def _character(head):
    """The labels of the first character in `head`, one a byte."""
    for size in range(1, len(head) + 1):
        try:
            character = VISIBLE.get(c := head[:size].decode(), c)
        except UnicodeDecodeError:
            continue
        if character.isprintable() and _drawable(character):
            return [character] + ["·"] * (size - 1)
        break
    return [f"{head[0]:02x}"]


def _drawable(character):
    return any(ord(character) in _glyphs(family) for family in token_fonts())


@functools.cache
def _glyphs(family):
    try:
        path = font_manager.findfont(family, fallback_to_default=False)
    except ValueError:
        return frozenset()
    return frozenset(font_manager.get_font(path).get_charmap())
