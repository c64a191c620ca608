"""Inputs and targets for a byte-level language model: random for training, fixed for evaluation."""

from collections.abc import Iterator
from itertools import count as count_from

import numpy as np
import torch

from linattn_edu import validate
from linattn_edu.data.texts import BOOKS, SPLITS, load_bytes

Pair = tuple[torch.Tensor, torch.Tensor]


def members(source: str) -> tuple[str, ...]:
    """The texts of a split ("train", "validation"), or the one text of that name."""
    if source in SPLITS:
        return SPLITS[source]
    if source in BOOKS:
        return (source,)
    raise ValueError(f"`source`: got {source!r}, expected one of {', '.join((*SPLITS, *BOOKS))}")


def _check_length(length: int, texts: dict[str, torch.Tensor]) -> None:
    validate.count("length", length, most=min(map(len, texts.values())) - 1)


def batches(
    source: str = "train", *, batch: int, length: int, seed: int = 0, start: int = 0
) -> Iterator[Pair]:
    """Endless random windows: pairs (inputs, targets), int64, shape [batch, length].

    targets[:, t] is the byte after inputs[:, t]. A window lies inside one text, and every
    window of the source is equally likely. Batch number i depends on (seed, i) alone, so
    `start=i` continues a run that has used i batches.
    """
    texts = {name: load_bytes(name) for name in members(source)}
    _check_length(length, texts)
    validate.count("batch", batch)
    validate.count("seed", seed, least=0)
    validate.count("start", start, least=0)
    # Offsets index the concatenation of all texts' window starts, of which each text has len - length.
    ends = np.cumsum([len(text) - length for text in texts.values()])
    for i in count_from(start):
        offsets = np.random.default_rng([seed, i]).integers(ends[-1], size=batch)
        which = np.searchsorted(ends, offsets, side="right")
        rows = []
        for text, offset in zip(which, offsets):
            first = offset - (ends[text - 1] if text else 0)
            rows.append(list(texts.values())[text][first : first + length + 1])
        window = torch.stack(rows).long()
        yield window[:, :-1], window[:, 1:]


def windows(source: str = "validation", *, length: int, count: int | None = None) -> Pair:
    """Fixed windows in order of position: (inputs, targets), int64, shape [N, length].

    Window n of a text starts at byte n * length, so that the targets of all windows are
    consecutive: each byte but the first is predicted once, except the text's last
    (size - 1) % length. `count` keeps that many windows, evenly spaced over the source.
    Column t of a loss [N, length] is the loss with t + 1 bytes of context.
    """
    texts = {name: load_bytes(name) for name in members(source)}
    _check_length(length, texts)
    inputs, targets = [], []
    for text in texts.values():
        n = (len(text) - 1) // length
        inputs.append(text[: n * length].view(n, length))
        targets.append(text[1 : n * length + 1].view(n, length))
    x, y = torch.cat(inputs), torch.cat(targets)
    if count is not None:
        validate.count("count", count, most=len(x))
        chosen = torch.arange(count) * len(x) // count
        x, y = x[chosen], y[chosen]
    return x.long(), y.long()
