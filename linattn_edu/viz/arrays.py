"""Tensors of torch or NumPy as float64 arrays, with their shape checked."""

import numpy as np


def as_array(name, x, axes):
    """`x` as a NumPy array; `axes` ("T K V") names the axes that it must have."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().double().numpy()
    array = np.asarray(x, dtype=np.float64)
    letters = axes.split()
    if array.ndim != len(letters) or 0 in array.shape:
        raise ValueError(f"`{name}`: got shape {list(array.shape)}, expected [{', '.join(letters)}], none of them empty")
    return array


def same_size(name, got, expected, letter):
    if got != expected:
        raise ValueError(f"`{name}`: got {got}, expected {letter} = {expected}")
