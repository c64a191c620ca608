"""Shapes drawn to scale: the two bracketings of Q K^T V, and the causal mask cut into chunks."""

from numbers import Integral

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.patches import Rectangle

from .style import COLORS, MUTED, PAPER

KT = r"K^{\mathsf{T}}"
ROLES = {"Q": "queries", "K^T": "keys", "V": "values", "A": "error", "S": "state", "O": "output"}


def bracketing(T, K, V):
    """Draw (Q K^T) V above Q (K^T V), all matrices to one scale, with the multiplications of each; returns the Figure.

    The first bracketing makes a T x T matrix and costs T^2 K + T^2 V multiplications, the second makes a K x V matrix
    and costs T K V + T K V. Rectangles carry their name as `gid` ("Q", "K^T", "A", "V", "S", "O").
    """
    _positive(T=T, K=K, V=V)
    shapes = {"Q": (T, K), "K^T": (K, T), "A": (T, T), "V": (T, V), "S": (K, V), "O": (T, V)}
    rows = [
        (rf"$(Q{KT})\,V$:  $T^2K + T^2V$ = {T * T * (K + V):,} multiplications", "Q · K^T → A · V → O"),
        (rf"$Q\,({KT}V)$:  $TKV + TKV$ = {2 * T * K * V:,} multiplications", "K^T · V → S , Q · S → O"),
    ]
    scale = 3.0 / T
    while max(_length(formula, shapes, scale) for _, formula in rows) > 5.8:
        scale *= 0.98
    tall = max(T, K) * scale + 1.15
    figure = plt.figure(figsize=(6.0, 2 * tall))
    figure.set_layout_engine("none")
    for bottom, (title, formula) in zip((0.5, 0.0), rows):
        ax = figure.add_axes((0, bottom, 1, 0.5))
        ax.set(xlim=(-0.1, 5.9), ylim=(-tall / 2 + 0.12, tall / 2 + 0.12), aspect="equal")
        ax.axis("off")
        ax.text(0, tall / 2 - 0.12, title, va="center")
        _formula(ax, formula, shapes, scale)
    return figure


def chunked_mask(T, C):
    """Draw the causal T x T mask cut into chunks of C tokens; returns the Figure.

    Blocks on the diagonal are computed in the parallel form; every block below it reaches its queries through the
    state. The last chunk may be shorter. The drawn array holds 0 (masked), 1 (through the state), 2 (same chunk).
    """
    _positive(T=T, C=C)
    chunk = np.arange(T) // C
    kinds = np.tril(np.where(chunk[:, None] == chunk, 2, 1))
    fills = [PAPER, _tint(COLORS["state"], 0.45), COLORS["queries"]]
    figure, ax = plt.subplots(figsize=(6.0, 3.6))
    ax.imshow(kinds, cmap=ListedColormap(fills), vmin=0, vmax=2)
    edges = np.arange(0, T, C)
    ax.hlines(edges - 0.5, -0.5, T - 0.5, color=MUTED, linewidth=0.8)
    ax.vlines(edges - 0.5, -0.5, T - 0.5, color=MUTED, linewidth=0.8)
    centres = (edges + np.minimum(edges + C, T) - 1) / 2
    shown = slice(None, None, -(-len(edges) // 12))
    for axis, role in ((ax.xaxis, "keys"), (ax.yaxis, "queries")):
        axis.set_ticks(centres[shown], range(1, len(edges) + 1)[shown])
        axis.set_label_text(f"chunk of {role}", color=COLORS[role])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(True)
    notes = ("same chunk:\nparallel form", "earlier chunks:\nthrough the state", "future: masked")
    for n, (fill, note) in enumerate(zip(reversed(fills), notes)):
        top = 0.97 - 0.2 * n
        ax.scatter(1.09, top, s=80, marker="s", color=fill, edgecolor=MUTED, transform=ax.transAxes, clip_on=False)
        ax.text(1.15, top + 0.03, note, va="top", transform=ax.transAxes)
    return figure


def _formula(ax, formula, shapes, scale):
    """Draw the products of `formula`, one inch of the figure for each unit of `ax`."""
    x = 0.0
    for part in formula.split():
        slot = _slot(part, shapes, scale)
        if part in shapes:
            _matrix(ax, x + slot / 2, part, *shapes[part], scale)
        elif part != ",":
            ax.text(x + slot / 2, 0, part, ha="center", va="center", fontsize=24 if part == "·" else 13, color=MUTED)
        x += slot


def _matrix(ax, x, name, rows, columns, scale):
    """A rectangle centred at (x, 0), its name above and its shape below."""
    role, made = ROLES[name], name in "AS"
    ax.add_patch(Rectangle(
        (x - columns * scale / 2, -rows * scale / 2), columns * scale, rows * scale, gid=name,
        facecolor=_tint(COLORS[role], 0.5 if made else 0.18), edgecolor=COLORS[role], linewidth=1.8 if made else 0.8,
    ))  # fmt: skip
    symbol = f"${KT if name == 'K^T' else name}$"
    ax.text(x, rows * scale / 2 + 0.06, symbol, ha="center", va="bottom", color=COLORS[role])
    ax.text(x, -rows * scale / 2 - 0.06, _shape(rows, columns), ha="center", va="top", fontsize=10.5)


def _slot(part, shapes, scale):
    """Inches that a part of a formula takes: a matrix at least what its shape takes in print."""
    if part not in shapes:
        return 0.3
    return max(shapes[part][1] * scale, 0.085 * len(_shape(*shapes[part])))


def _length(formula, shapes, scale):
    return sum(_slot(part, shapes, scale) for part in formula.split())


def _shape(rows, columns):
    return f"{rows}×{columns}"


def _tint(color, strength):
    return tuple(strength * c + (1 - strength) * p for c, p in zip(to_rgb(color), to_rgb(PAPER)))


def _positive(**sizes):
    for name, size in sizes.items():
        if not isinstance(size, Integral) or size < 1:
            raise ValueError(f"`{name}`: got {size!r}, expected a whole number of at least 1")
