"""Tensors of torch or NumPy as float64 arrays, with their shape checked."""

import numpy as np

from linattn_edu.validate import describe


def as_array(name, x, *layouts, **sizes):
    """`x` as a NumPy array with the axes of one of `layouts` ("T K V"); `sizes` are the lengths that are known."""
    layouts = [layout.split() for layout in layouts]
    expected = " or ".join(f"[{', '.join(letters)}]" for letters in layouts)
    try:
        array = np.asarray(_plain(x), dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"`{name}`: got {describe(x)}, expected numbers {expected}") from None
    fits = any(
        len(letters) == array.ndim and all(sizes.get(letter, n) == n for letter, n in zip(letters, array.shape))
        for letters in layouts
    )
    if 0 in array.shape or not fits:
        known = " with " + ", ".join(f"{letter} = {size}" for letter, size in sizes.items()) if sizes else ""
        raise ValueError(f"`{name}`: got shape {list(array.shape)}, expected {expected}{known}, none empty")
    return array


def _plain(x):
    """What NumPy can read: of a tensor, or of each in a list, the values without graph, device or bfloat16."""
    if hasattr(x, "detach"):
        return x.detach().cpu().double().numpy()
    return [_plain(y) for y in x] if isinstance(x, (list, tuple)) else x


def same_size(name, got, expected, letter):
    if got != expected:
        raise ValueError(f"`{name}`: got {got}, expected {letter} = {expected}")
