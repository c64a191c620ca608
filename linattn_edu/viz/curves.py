"""Lines against tokens or positions, and bars: each line and bar is named where it stands."""

from collections.abc import Mapping

import numpy as np

from linattn_edu.validate import describe

from .arrays import as_array
from .style import COLORS, MUTED

CYCLE = [COLORS[role] for role in ("error", "queries", "values", "keys", "state", "gate")]


def curves(ax, x, series, *, xlabel, ylabel, colors=None, marker=None):
    """Draw each of `series` (name -> values) against `x`, named at its right end; returns `ax`.

    Values are `[X]`, or `[X, repeats]`: then the line is the median and the band runs from the least to the greatest.
    NaN leaves a point out (out of memory, say). `ylabel` names the quantity with its unit; `colors` maps names to
    colours.
    """
    _draw(ax, as_array("x", x, "X"), series, colors, marker)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.grid(axis="y")
    _name_lines(ax)
    return ax


def costs(ax, x, series, *, ylabel, xlabel="tokens T", slopes=(), colors=None):
    """Draw time, bytes or operations against `x` like `curves`, on log-log axes with the points marked; returns `ax`.

    `slopes=(1, 2)` adds guides proportional to T and T^2, each a little below the line that is nearest to it in slope.
    """
    x = as_array("x", x, "X")
    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    ax.grid(axis="y")
    lines = _draw(ax, x, series, colors, "o")
    for name, (_, low, _, _) in lines.items():
        if low.min() <= 0:
            raise ValueError(f"`series[{name!r}]`: got {low.min():g}, expected positive numbers on log axes")
    for slope in slopes:
        _guide(ax, slope, lines.values())
    room = ax.figure.get_size_inches()[0] * ax.get_position().width / 0.6
    ticks = x[:: -(-len(x) // max(int(room), 1))]
    ax.set_xticks(ticks, [_short(t) for t in ticks])
    ax.set_xticks([], minor=True)
    _name_lines(ax)
    return ax


def bars(ax, values, *, xlabel, color=MUTED, form="{:.3g}"):
    """Draw `values` (name -> number) as horizontal bars, first on top, each with its number; returns `ax`.

    `color` is one colour, or a mapping from name to colour; `form` formats the numbers.
    """
    _check_mapping("values", values)
    names, sizes = list(values), as_array("values", list(values.values()), "N")
    colors = [color.get(name, MUTED) for name in names] if isinstance(color, dict) else color
    drawn = ax.barh(range(len(names)), sizes, height=0.62, color=colors)
    ax.bar_label(drawn, [form.format(size) for size in sizes], padding=4)
    ax.set(xlabel=xlabel, ylim=(len(names) - 0.5, -0.5))
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.margins(x=0.12)
    return ax


def _check_mapping(name, values):
    if not isinstance(values, Mapping) or not values:
        raise ValueError(f"`{name}`: got {describe(values)}, expected a mapping from names to values, at least one")


def _draw(ax, x, series, colors, marker):
    _check_mapping("series", series)
    lines = {name: _median(name, x, values) for name, values in series.items()}
    for n, (name, (at, low, middle, high)) in enumerate(lines.items()):
        color = (colors or {}).get(name, CYCLE[n % len(CYCLE)])
        ax.plot(at, middle, color=color, marker=marker, label=name)
        if (low < high).any():
            ax.fill_between(at, low, high, color=color, alpha=0.2, linewidth=0)
    return lines


def _median(name, x, values):
    """Where there are values: x, and their least, median and greatest."""
    name = f"series[{name!r}]"
    values = as_array(name, values, "X", "X repeats", X=len(x)).reshape(len(x), -1)
    here = ~np.isnan(values).any(1)
    if not here.any():
        raise ValueError(f"`{name}`: got NaN alone, expected at least one number")
    values = values[here]
    return x[here], values.min(1), np.median(values, 1), values.max(1)


def _guide(ax, slope, lines):
    def end_slope(line):
        x, _, y, _ = line
        return np.log(y[-1] / y[0]) / np.log(x[-1] / x[0]) if len(x) > 1 else np.inf

    x, _, y, _ = min(lines, key=lambda line: abs(end_slope(line) - slope))
    at = x[len(x) // 2 :]
    name = rf"$\propto {'T' if slope == 1 else f'T^{{{slope:g}}}'}$"
    ax.plot(at, y[-1] / 3 * (at / at[-1]) ** slope, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label=name)


def _name_lines(ax):
    """Name each line: right of its last point, moved off its neighbours, or above it if the line stops early."""
    ax.autoscale_view()
    points = 72 * ax.figure.get_size_inches()[1] * ax.get_position().height
    style = {"textcoords": "offset points", "annotation_clip": False}
    lines = [line for line in ax.lines if not line.get_label().startswith("_")]
    end = max(line.get_xdata()[-1] for line in lines)
    full = []
    for line in lines:
        last = line.get_xdata()[-1], line.get_ydata()[-1]
        if last[0] == end:
            height = ax.transLimits.transform(ax.transScale.transform(last))[1] * points
            full.append((height, line.get_label(), last, line.get_color()))
        else:
            ax.annotate(line.get_label(), last, (-8, 4), ha="right", color=line.get_color(), **style)
    full.sort()
    for place, (height, name, last, color) in zip(_apart([height for height, *_ in full], 15), full):
        ax.annotate(name, last, (9, place - height), va="center", color=color, **style)


def _apart(places, gap):
    """Ascending `places` moved, evenly up and down, until neighbours are at least `gap` apart."""
    places = list(places)
    for _ in range(200):
        for n in range(1, len(places)):
            push = max(0.0, gap - (places[n] - places[n - 1])) / 2
            places[n - 1] -= push
            places[n] += push
    return places


def _short(number):
    """2048 as 2K, 2^20 as 1M."""
    for size, letter in ((2**20, "M"), (2**10, "K")):
        if number >= size and number % size == 0:
            return f"{number / size:g}{letter}"
    return f"{number:g}"
