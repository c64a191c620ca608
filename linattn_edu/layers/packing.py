"""Padding, once for all recurrent layers: real tokens are packed into one row, and their outputs scattered back.

A recurrent layer would let a padding token decay its state and enter its convolution. Instead of a rule for padding in
every formula the padding is taken out: of a batch [B, T, D] with a mask remain the real tokens of all rows, one row
behind the other, [1, total, D] with `cu_seqlens`, which the operators know already. Any mask will do: padding left,
right, or in between.
"""

import torch
import torch.nn.functional as F
from torch import nn

from linattn_edu import validate
from linattn_edu.layers.cache import Cache
from linattn_edu.validate import Sizes


def check(layer, x, cache, mask, cu_seqlens):
    """Check the arguments of a layer's `forward`, and return N, the number of sequences.

    Raises:
        ValueError: a wrong shape, dtype or device; `mask` together with `cu_seqlens`; a cache of other sequences.
        TypeError: an argument that is no tensor, or a cache that is no Cache.
    """
    sizes = Sizes()
    sizes.bind("D", layer.width, "the layer")
    validate.floating_tensor("x", x, "B T D", sizes, like=_entrance(layer), share_dtype=not validate.autocasting(x))
    N, origin = x.shape[0], "`x`"
    if mask is not None:
        if cu_seqlens is not None:
            raise ValueError("`mask`: got one together with `cu_seqlens`, expected at most one of the two")
        _check_mask(mask, x)
    if cu_seqlens is not None:
        N, origin = validate.sequence_count(cu_seqlens, sizes, x.device), "`cu_seqlens`"
    if cache is not None:
        if not isinstance(cache, Cache):
            raise TypeError(f"`cache`: got {validate.describe(cache)}, expected the Cache that a layer returned")
        if cache.seen is None:
            raise ValueError("`cache`: got an empty Cache, expected one that a layer returned; None at the beginning")
        if len(cache.seen) != N:
            raise ValueError(f"`cache`: got one of {len(cache.seen)} sequences, expected N = {N} as in {origin}")
        if cache.seen.device != x.device:
            raise ValueError(f"`cache`: got device {cache.seen.device}, expected {x.device} as in `x`")
    return N


def _entrance(layer):
    """The matrix that x meets, with its name; None if another class or a hook stands there, which may do as it likes."""
    name, child = next(layer.named_children(), ("", None))
    plain = type(child) is nn.Linear and not child._forward_pre_hooks and "forward" not in vars(child)
    return (f"{name}.weight", child.weight) if plain else None


def _check_mask(mask, x):
    B, T, _ = x.shape
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"`mask`: got {validate.describe(mask)}, expected a bool tensor [B, T], True for a real token")
    if mask.dtype != torch.bool:
        raise ValueError(f"`mask`: got dtype {mask.dtype}, expected torch.bool, True for a real token")
    if mask.shape != (B, T):
        raise ValueError(f"`mask`: got shape {list(mask.shape)}, expected [B, T] = [{B}, {T}] as in `x`")
    if mask.device != x.device:
        raise ValueError(f"`mask`: got device {mask.device}, expected {x.device} as in `x`")


def pack(x, mask):
    """The real tokens of x [B, T, D] as one row [1, total, D], and the bounds [B+1] of the rows in it."""
    return x[mask][None], F.pad(mask.sum(1).cumsum(0), (1, 0))


def scatter(y, mask):
    """What `pack` took out put back: y [1, total, ...] -> [B, T, ...], zero at padding."""
    return y.new_zeros(*mask.shape, *y.shape[2:]).index_put((mask,), y[0])


def lengths(x, cu_seqlens):
    """Tokens of each sequence, [N] int64 on the device of x."""
    if cu_seqlens is None:
        return torch.full((x.shape[0],), x.shape[1], dtype=torch.int64, device=x.device)
    return cu_seqlens.to(x.device, torch.int64).diff()


def positions(x, seen, cu_seqlens):
    """The place of each token in its sequence, [B, T] int64, where `seen` [N] tokens (None: 0) have come before."""
    T = x.shape[1]
    t = torch.arange(T, device=x.device)
    if cu_seqlens is None:
        return t.expand(x.shape[:2]) if seen is None else seen[:, None] + t
    bounds = cu_seqlens.to(x.device, torch.int64)
    first = bounds[:-1] - (0 if seen is None else seen)
    return (t - torch.repeat_interleave(first, bounds.diff(), output_size=T))[None]


def rows(cu_seqlens):
    """Where the tokens of packed sequences lie if each sequence gets a row of its own: a mask [N, longest].

    `scatter(x, rows(cu_seqlens))` lays them out so, padded with zeros on the right.
    """
    size = cu_seqlens.diff()
    return torch.arange(int(size.max()) if len(size) else 0, device=size.device) < size[:, None]
