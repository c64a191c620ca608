"""Tensors of torch or NumPy as float64 arrays, with their shape checked."""

import numpy as np


def as_array(name, x, axes, **sizes):
    """`x` as a NumPy array; `axes` ("T K V") names the axes that it must have, `sizes` the lengths that are known."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().double().numpy()
    array = np.asarray(x, dtype=np.float64)
    letters = axes.split()
    if array.ndim != len(letters) or 0 in array.shape or any(
        size != sizes.get(letter, size) for letter, size in zip(letters, array.shape)
    ):  # fmt: skip
        known = " with " + ", ".join(f"{letter} = {size}" for letter, size in sizes.items()) if sizes else ""
        raise ValueError(f"`{name}`: got shape {list(array.shape)}, expected [{', '.join(letters)}]{known}, none empty")
    return array


def same_size(name, got, expected, letter):
    if got != expected:
        raise ValueError(f"`{name}`: got {got}, expected {letter} = {expected}")
