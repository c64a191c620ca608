"""Attention weights as heat maps: a row is a query, a column a key."""

import math

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import Normalize

from linattn_edu import validate

from .arrays import as_array, same_size
from .style import COLORS, SIGNED, WEIGHTS
from .tokens import token_fonts, token_labels

MASKED = "#ECECE8"
POINTS_A_LABEL = 11


def attention_map(ax, weights, tokens_q=None, tokens_k=None, *, causal=False, vmax=None, title=None, colorbar=True):
    """Draw `weights [Tq, Tk]` on `ax` and return `ax`.

    White is 0 and `vmax` (default: the largest weight) the darkest; if any weight is negative the colours diverge
    around 0. `causal=True` greys the cells that the mask removes. Tokens label the axes (see `token_labels`) as long
    as each has room; `tokens_k` is `tokens_q` when the map is square.
    """
    weights = as_array("weights", weights, "Tq Tk")
    rows, columns = weights.shape
    shown = np.ma.masked_array(weights, np.triu(np.ones_like(weights), 1 + columns - rows) * causal)
    colors, norm = _scale(shown, vmax)
    image = ax.imshow(shown, cmap=colors.with_extremes(bad=MASKED), norm=norm)
    if tokens_k is None and rows == columns:
        tokens_k = tokens_q
    _label(ax, ax.yaxis, "tokens_q", tokens_q, rows)
    _label(ax, ax.xaxis, "tokens_k", tokens_k, columns)
    ax.set_xlabel("key", color=COLORS["keys"])
    ax.set_ylabel("query", color=COLORS["queries"])
    ax.set_title(title)
    _frame(ax)
    if colorbar:
        bar(image, ax, "weight")
    return ax


def attention_maps(weights, titles=None, tokens=None, *, causal=False, vmax=None, columns=4, label="weight"):
    """Several maps `weights [N, Tq, Tk]` on one colour scale, `columns` to a row; returns the Figure."""
    weights = as_array("weights", weights, "N Tq Tk")
    titles = [None] * len(weights) if titles is None else list(titles)
    same_size("titles", len(titles), len(weights), "N")
    columns = min(validate.count("columns", columns), len(weights))
    rows = math.ceil(len(weights) / columns)
    vmax = float(np.abs(weights).max()) if vmax is None else vmax
    height = 0.55 + rows * (min(4.3 / columns, 4.0) + 0.4)
    figure, axes = plt.subplots(rows, columns, squeeze=False, figsize=(6.0, height))
    for ax, map_, title in zip(axes.flat, weights, titles):
        attention_map(ax, map_, tokens, causal=causal, vmax=vmax, title=title, colorbar=False)
        ax.label_outer()
        ax.set(xlabel="", ylabel="", anchor="S")
    for ax in axes.flat[len(weights) :]:
        ax.set_visible(False)
    figure.supxlabel("key", color=COLORS["keys"], fontsize="medium")
    figure.supylabel("query", color=COLORS["queries"], fontsize="medium")
    bar(axes[0, -1].images[0], axes[0, -1], label, scale=columns)
    return figure


def bar(image, ax, label=None, scale=1):
    """A thin colour bar right of `ax` and as high, with few ticks; `scale` widens it beside a narrow `ax`."""
    width = 0.04 * scale
    colors = ax.figure.colorbar(image, cax=ax.inset_axes((1.02 + width, 0, width, 1)), label=label)
    colors.outline.set_visible(False)
    colors.locator = plt.MaxNLocator(4)
    colors.update_ticks()


def _scale(weights, vmax):
    vmax = float(np.abs(weights).max()) or 1.0 if vmax is None else vmax
    return (SIGNED, Normalize(-vmax, vmax)) if weights.min() < 0 else (WEIGHTS, Normalize(0, vmax))


def _label(ax, axis, name, tokens, size):
    """Tokens as tick labels if each has room, else a few positions."""
    axis.set_major_locator(plt.MaxNLocator(4, integer=True))
    if tokens is None:
        return
    labels = token_labels(tokens)
    same_size(name, len(labels), size, "T")
    cell = 72 * (ax.get_position().size * ax.figure.get_size_inches()).min() / max(ax.images[0].get_array().shape)
    if cell >= POINTS_A_LABEL:
        upright = axis is ax.yaxis or max(map(len, labels)) <= 2
        axis.set_ticks(range(size), labels, parse_math=False, family=token_fonts(), rotation=0 if upright else 90)


def _frame(ax):
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
