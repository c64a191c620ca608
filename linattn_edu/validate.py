"""Checks of arguments, in the letters of the book: `B T H HV K V N C`.

A wrong shape, dtype, device, head ratio or value raises `ValueError`; an argument that is missing, or is no tensor
or number, raises `TypeError`. Each message names the argument, what came and what was expected.
"""

import functools
import inspect
import math
from numbers import Integral, Real

import torch


class Sizes:
    """The letters seen so far, each bound to a number by the first argument that has it."""

    def __init__(self):
        self._bound = {}

    def __getitem__(self, letter):
        return self._bound[letter][0]

    def bind(self, letter, size, origin):
        self._bound[letter] = (size, origin)

    def copy(self):
        other = Sizes()
        other._bound = self._bound.copy()
        return other

    def fits(self, shape, letters):
        return len(shape) == len(letters) and all(
            self._bound.get(letter, (size,))[0] == size for letter, size in zip(letters, shape)
        )

    def describe(self, letters):
        """`[B, T, HV, V] with B = 2 and T = 7 as in `q``, for the letters that are already bound."""
        known = {}
        for letter in letters:
            if letter in self._bound:
                size, origin = self._bound[letter]
                known.setdefault(origin, []).append(f"{letter} = {size}")
        given = [" and ".join(pairs) + f" as in {origin}" for origin, pairs in known.items()]
        return f"[{', '.join(letters)}]" + (" with " + ", ".join(given) if given else "")


def floating(name, x):
    """Check that `x` is a floating tensor, of whatever shape."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"`{name}`: got {describe(x)}, expected a tensor")
    if not x.is_floating_point():
        raise ValueError(f"`{name}`: got dtype {x.dtype}, expected a floating dtype")


def integer(name, x):
    """Check that `x` is a tensor of whole numbers, of whatever shape."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"`{name}`: got {describe(x)}, expected an integer tensor")
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ValueError(f"`{name}`: got dtype {x.dtype}, expected an integer dtype")


def floating_tensor(name, x, axes, sizes, *, like=None, share_dtype=False):
    """Check that `x` is a floating tensor whose axes are the letters of `axes` ("B T H K"), and bind new letters.

    `like` is a pair (name, tensor) whose device, and with `share_dtype` also its dtype, `x` must share.
    """
    _tensor(floating, name, x, axes, sizes, like, share_dtype)


def integer_tensor(name, x, axes, sizes, *, like=None):
    """The same for a tensor of whole numbers, in any integer dtype."""
    _tensor(integer, name, x, axes, sizes, like, False)


def _tensor(check_dtype, name, x, axes, sizes, like, share_dtype):
    letters = axes.split()
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"`{name}`: got {describe(x)}, expected a tensor {sizes.describe(letters)}")
    check_dtype(name, x)
    if not sizes.fits(x.shape, letters):
        raise ValueError(
            f"`{name}`: got shape {list(x.shape)}, expected {sizes.describe(letters)}{_layout_hint(x, letters, sizes)}"
        )
    for letter, size in zip(letters, x.shape):
        if letter not in sizes._bound:
            if size == 0 and letter not in ("B", "T", "N", "L"):
                raise ValueError(f"`{name}`: got shape {list(x.shape)}, expected {letter} of at least 1")
            sizes.bind(letter, size, f"`{name}`")
    if like is not None:
        other, reference = like
        if x.device != reference.device:
            raise ValueError(f"`{name}`: got device {x.device}, expected {reference.device} as in `{other}`")
        if share_dtype and x.dtype != reference.dtype:
            raise ValueError(f"`{name}`: got dtype {x.dtype}, expected {reference.dtype} as in `{other}`")


def _layout_hint(x, letters, sizes):
    """Name the usual slip, heads before tokens, where swapping the two axes would fit."""
    if x.dim() < 3 or "T" not in letters:
        return ""
    swapped = [x.shape[0], x.shape[2], x.shape[1], *x.shape[3:]]
    if not sizes.fits(swapped, letters):
        return ""
    heads = letters[2]
    return f"; this tensor or the first one seems to have heads before tokens ([B, {heads}, T, ...]): transpose(1, 2)"


def head_ratio(many, few, sizes, name):
    """Check that heads of kind `many` share those of kind `few` in equal groups."""
    if sizes[many] % sizes[few]:
        raise ValueError(f"`{name}`: got {many} = {sizes[many]} heads, expected a multiple of {few} = {sizes[few]}")


def autocasting(x):
    """Whether an enclosing `torch.autocast` chooses the dtype of products on the device of `x`."""
    if not isinstance(x, torch.Tensor):
        return False
    device = x.device.type
    # torch.compile of 2.11 cannot ask for the first; what it compiles for has autocast.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
    return available and torch.is_autocast_enabled(device)


def number(name, x, *, positive=False, negative=False):
    """Check that `x` is a finite number, and return it as a float, which torch takes where it takes no other kind."""
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"`{name}`: got {describe(x)}, expected a number")
    try:
        value = float(x)
    except OverflowError:
        value = math.inf
    kind, fits = (" positive", value > 0) if positive else (" negative", value < 0) if negative else ("", True)
    if not (math.isfinite(value) and fits):
        raise ValueError(f"`{name}`: got {x!s:.40}, expected a finite{kind} number")
    return value


def count(name, x, *, least=1, most=None):
    """Check that `x` is a whole number from `least` to `most`, where None is no bound, and return it as an int."""
    bounds = "" if least is None else f" of at least {least}" if most is None else f" from {least} to {most}"
    if isinstance(x, bool) or not isinstance(x, Integral):
        raise TypeError(f"`{name}`: got {describe(x)}, expected a whole number{bounds}")
    if (least is not None and x < least) or (most is not None and x > most):
        raise ValueError(f"`{name}`: got {x}, expected a whole number{bounds}")
    return int(x)


def interval(name, x, *, endless=False):
    """Check that `x` is a pair of numbers, 0 <= low <= high and 0 < high (`endless`: even inf), and return it."""
    try:
        low, high = x
    except (TypeError, ValueError):
        raise TypeError(f"`{name}`: got {describe(x)}, expected two numbers (low, high)") from None
    low, high = number(name, low), high if endless and high == math.inf else number(name, high)
    if not 0 <= low <= high or high == 0:
        raise ValueError(f"`{name}`: got {x}, expected 0 <= low <= high and high above 0")
    return low, high


def flag(name, x):
    """Check that `x` is True or False, and return it."""
    if not isinstance(x, bool):
        raise TypeError(f"`{name}`: got {describe(x)}, expected True or False")
    return x


def names(name, given, known):
    """Check that `given` names only what is known."""
    for each in given:
        if each not in known:
            raise ValueError(f"`{name}`: got {each!r}, expected names among {', '.join(known)}")


def token_ids(ids):
    """Check that `ids` is a tensor [B, T] of integers that an embedding takes."""
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"`ids`: got {describe(ids)}, expected an integer tensor [B, T]")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"`ids`: got dtype {ids.dtype}, expected torch.int32 or torch.int64")
    if ids.dim() != 2:
        hint = ": ids[None] for one prompt" if ids.dim() == 1 else ""
        raise ValueError(f"`ids`: got shape {list(ids.shape)}, expected [B, T]{hint}")


def sequence_count(cu_seqlens, sizes, device):
    """Check `cu_seqlens` and return N; the positions of a tensor on a GPU are not looked at, which would wait for it."""
    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(f"`cu_seqlens`: got {describe(cu_seqlens)}, expected an integer tensor [N+1]")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"`cu_seqlens`: got dtype {cu_seqlens.dtype}, expected torch.int32 or torch.int64")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"`cu_seqlens`: got shape {list(cu_seqlens.shape)}, expected [N+1]")
    if cu_seqlens.device.type != "cpu" and cu_seqlens.device != device:
        raise ValueError(f"`cu_seqlens`: got device {cu_seqlens.device}, expected cpu or {device} as in `q`")
    if sizes["B"] != 1:
        raise ValueError(f"`cu_seqlens`: got B = {sizes['B']}, expected B = 1: packed sequences share one row")
    if cu_seqlens.device.type == "cpu":
        _increasing(cu_seqlens.tolist(), sizes)
    return len(cu_seqlens) - 1


def sequence_bounds(cu_seqlens, sizes, device):
    """Check `cu_seqlens` and return it as a list of N + 1 token positions."""
    sequence_count(cu_seqlens, sizes, device)
    return _increasing(cu_seqlens.tolist(), sizes)


def _increasing(bounds, sizes):
    if bounds[0] != 0 or bounds[-1] != sizes["T"] or any(a > b for a, b in zip(bounds, bounds[1:])):
        raise ValueError(
            f"`cu_seqlens`: got {bounds if len(bounds) <= 8 else f'{bounds[:4]} ... {bounds[-2:]}'}, "
            f"expected positions that start at 0, never decrease and end at T = {sizes['T']}"
        )
    return bounds


def binder(function, signature):
    """The function of (args, kwargs) that gives the arguments of a call by name, defaults filled in.

    A missing or unknown one raises `TypeError`. What does not change from call to call is worked out here.
    """
    parameters = signature.parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    defaults = {name: p.default for name, p in parameters.items()}
    required = [name for name, x in defaults.items() if x is inspect.Parameter.empty]
    expected = ", ".join(f"`{name}`" for name in parameters)

    def bind(args, kwargs):
        if len(args) > len(positional):
            raise TypeError(
                f"{function}() got {len(args)} positional arguments, expected {len(positional)}; "
                f"name the rest: {', '.join(f'`{name}`' for name in parameters if name not in positional)}"
            )
        given = dict(zip(positional, args))
        for name in kwargs:
            if name in given:
                raise TypeError(f"{function}() got `{name}` twice, expected it once")
            if name not in defaults:
                raise TypeError(f"{function}() got the unknown argument `{name}`, expected {expected}")
        found = {**defaults, **given, **kwargs}
        for name in required:
            if found[name] is inspect.Parameter.empty:
                raise TypeError(f"{function}() got no argument `{name}`, expected {expected}")
        return found

    return bind


def named(function):
    """Report missing and unknown arguments of a function by name, as the derived forms do."""
    title = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
    bind = binder(title, inspect.signature(function))

    @functools.wraps(function)
    def checked(*args, **kwargs):
        return function(**bind(args, kwargs))

    return checked


def describe(x):
    if x is None:
        return "nothing (None)"
    return f"a tensor of shape {list(x.shape)}" if isinstance(x, torch.Tensor) else f"{type(x).__name__} {x!r:.40}"
