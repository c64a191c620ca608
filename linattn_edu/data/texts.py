"""The books: what they are, where they come from, and how to read them."""

import lzma
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import torch

from linattn_edu import validate


@dataclass(frozen=True)
class Book:
    """One text of the package, stored byte for byte as its source has it."""

    title: str
    author: str
    year: str
    size: int
    sha256: str
    origin: str
    rights: str


_JANEAUSTENR = (
    "Debian package r-cran-janeaustenr 1.0.0 (R package janeaustenr, MIT licence, "
    "copyright 2016-2017 Julia Silge)"
)
_CHINESE_POETRY = "npm package chinese-poetry 2.0.1 (MIT licence), 14 chapters"
_PUBLIC_DOMAIN = "the text is in the public domain"

BOOKS = {
    "emma": Book(
        "Emma", "Jane Austen", "1815", 883_027,
        "dd08b340a56ad4a0a00718d5682528a5a5886ae0aef91c9e0fa528074fa64b75",
        _JANEAUSTENR, _PUBLIC_DOMAIN,
    ),
    "sense_and_sensibility": Book(
        "Sense and Sensibility", "Jane Austen", "1811", 673_687,
        "0996d90842bbe8093f3b8142c1e77d1b20cff52d1d0615f3ed67733653e74e26",
        _JANEAUSTENR, _PUBLIC_DOMAIN,
    ),
    "pride_and_prejudice": Book(
        "Pride and Prejudice", "Jane Austen", "1813", 684_767,
        "2e44edaa4946d64ad541c68e0224f5d672f43bf3ce2a8a0b0637ad5e02fc6eb3",
        _JANEAUSTENR, _PUBLIC_DOMAIN,
    ),
    "mengzi": Book(
        "孟子 (Mencius)", "孟軻 and disciples", "4th century BCE", 135_454,
        "a91e6f18c1a2feced8abb064ce7c73702cc4e8cf212d0b3279577f6cda76a95a",
        _CHINESE_POETRY, _PUBLIC_DOMAIN,
    ),
}

# By whole novels, so that no sentence of the validation text is seen in training.
SPLITS = {
    "train": ("emma", "sense_and_sensibility"),
    "validation": ("pride_and_prejudice",),
}


def names() -> tuple[str, ...]:
    """Names of all texts, in the order of the catalogue."""
    return tuple(BOOKS)


@cache
def _raw(name: str) -> bytes:
    if name not in BOOKS:
        raise ValueError(f"`name`: got {name!r}, expected one of {', '.join(BOOKS)}")
    packed = files(__package__).joinpath("texts", f"{name}.txt.xz").read_bytes()
    return lzma.decompress(packed)


def load_text(name: str) -> str:
    """The whole text as a string; line ends are "\\n" on every system."""
    return _raw(name).decode("utf-8")


def load_bytes(name: str) -> torch.Tensor:
    """The whole text as its UTF-8 bytes: uint8, shape [size], a fresh copy."""
    return torch.from_numpy(np.frombuffer(_raw(name), dtype=np.uint8).copy())


def encode(text: str) -> torch.Tensor:
    """Token ids of a string, which are its UTF-8 bytes: int64, shape [T], 0 to 255."""
    if not isinstance(text, str):
        raise TypeError(f"`text`: got {validate.describe(text)}, expected a string")
    return torch.tensor(list(text.encode("utf-8")), dtype=torch.long)


def decode(ids: torch.Tensor) -> str:
    """The string of token ids [T]; bytes that are no UTF-8 become U+FFFD."""
    validate.integer_tensor("ids", ids, "T", validate.Sizes())
    values = ids.tolist()
    if values and not 0 <= min(values) <= max(values) <= 255:
        raise ValueError(f"`ids`: got ids from {min(values)} to {max(values)}, expected bytes, 0 to 255")
    return bytes(values).decode("utf-8", errors="replace")


def provenance(name: str | None = None) -> str:
    """Origin and rights of one text, or of all."""
    if name is None:
        return "\n\n".join(provenance(each) for each in BOOKS)
    if name not in BOOKS:
        raise ValueError(f"`name`: got {name!r}, expected one of {', '.join(BOOKS)}")
    book = BOOKS[name]
    split = next((s for s, members in SPLITS.items() if name in members), "none")
    return (
        f"{name}: {book.title}, {book.author}, {book.year}\n"
        f"  {book.size:,} bytes, split: {split}\n"
        f"  origin: {book.origin}\n"
        f"  rights: {book.rights}\n"
        f"  sha256: {book.sha256}"
    )
