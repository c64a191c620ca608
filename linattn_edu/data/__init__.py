"""Public-domain books, offline and byte-level, split by novel.

    >>> from linattn_edu import data
    >>> data.names()
    ('emma', 'sense_and_sensibility', 'pride_and_prejudice', 'mengzi')
    >>> data.load_text("pride_and_prejudice")[51:90]
    'It is a truth universally acknowledged,'
    >>> x, y = next(data.batches("train", batch=4, length=128, seed=0))
    >>> x.shape, bool((x[:, 1:] == y[:, :-1]).all())
    (torch.Size([4, 128]), True)

A token is a byte: 256 ids, no tokenizer. Training reads Emma and Sense and Sensibility;
validation reads Pride and Prejudice, a novel that training never sees. `mengzi` is in neither.
`digits` are images: 1,797 handwritten digits of 8 x 8 pixels.
`python -m linattn_edu.data` prints origin and rights.
"""

from linattn_edu.data.images import DIGITS, digits
from linattn_edu.data.sampling import batches, members, windows
from linattn_edu.data.texts import BOOKS, SPLITS, Book, decode, encode, load_bytes, load_text, names, provenance

__all__ = [
    "BOOKS", "DIGITS", "SPLITS", "Book", "batches", "decode", "digits", "encode",
    "load_bytes", "load_text", "members", "names", "provenance", "windows",
]
