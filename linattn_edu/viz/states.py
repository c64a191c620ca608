"""The state S [K, V] of linear attention: a row is a key channel, a column a value channel."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

from .arrays import as_array, same_size
from .attention import bar
from .player import film
from .style import COLORS, INK, SIGNED
from .tokens import token_fonts, token_labels

MOST_FRAMES = 24


def state_map(ax, state, *, limit=None, title=None, colorbar=True):
    """Draw `state [K, V]` on `ax`, colours centred at 0 and reaching to `limit` (default: the largest entry)."""
    state = as_array("state", state, "K V")
    image = _signed(ax, state, limit)
    ax.set_xlabel("value channel", color=COLORS["values"])
    ax.set_ylabel("key channel", color=COLORS["keys"])
    ax.set_title(title)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(plt.MaxNLocator(4, integer=True))
    if colorbar:
        bar(image, ax, "entry")
    return ax


def state_strip(states, *, times=None, tokens=None, limit=None):
    """The states `states [T, K, V]` after the tokens numbered `times` (from 1; default four), on one colour scale.

    `states[t - 1]` is S_t. Returns the Figure; 4 to 6 of them read well.
    """
    states = as_array("states", states, "T K V")
    total, rows, columns = states.shape
    times = np.unique(np.geomspace(1, total, 4).round().astype(int)) if times is None else list(times)
    labels = None if tokens is None else token_labels(tokens)
    if labels is not None:
        same_size("tokens", len(labels), total, "T")
    if not len(times) or not all(t in range(1, total + 1) for t in times):
        raise ValueError(f"`times`: got {list(times)}, expected whole numbers from 1 to T = {total}, at least one")
    times = [int(t) for t in times]
    height = (0.95 if labels else 0.75) + 4.2 / len(times) * rows / columns
    figure, axes = plt.subplots(1, len(times), squeeze=False, figsize=(6.0, height))
    limit = np.abs(states).max() if limit is None else limit
    for ax, t in zip(axes[0], times):
        state_map(ax, states[t - 1], limit=limit, colorbar=False)
        ax.set(xticks=[], yticks=[], xlabel="", ylabel="", anchor="S")
        ax.set_title(f"t = {t}" + (f"\nafter {labels[t - 1]}" if labels else ""), parse_math=False)
    figure.supylabel("key channel", color=COLORS["keys"], fontsize="medium")
    figure.supxlabel("value channel", color=COLORS["values"], fontsize="medium")
    bar(axes[0, -1].images[0], axes[0, -1], "entry of $S_t$", scale=len(times))
    return figure


def state_film(states, *, alt, keys=None, values=None, tokens=None, limit=None, fps=2.0, still=-1):
    """A Film of `states [T, K, V]`, one frame a token, with `keys [T, K]` and `values [T, V]` along the edges.

    `states[t - 1]` is S_t. At most 24 tokens: pass a slice of a longer sequence. See `film` for `alt`, `fps`, `still`.
    """
    states = as_array("states", states, "T K V")
    total, rows, columns = states.shape
    if total > MOST_FRAMES:
        raise ValueError(f"`states`: got T = {total}, expected at most {MOST_FRAMES}; pass a slice")
    figure, main, key, value = _edges(rows, columns)
    limit = np.abs(states).max() if limit is None else limit
    pictures = [(_signed(main, states[-1], limit), states)]
    bar(main.images[0], main)
    for ax, vectors, name, letter, shape in (
        (key, keys, "keys", "K", (rows, 1)), (value, values, "values", "V", (1, columns)),
    ):  # fmt: skip
        if vectors is None:
            ax.set_visible(False)
            continue
        vectors = as_array(name, vectors, f"T {letter}", **{"T": total, letter: max(shape)}).reshape(-1, *shape)
        pictures.append((_signed(ax, vectors[-1], np.abs(vectors).max()), vectors))
    move = _tape(figure, token_labels(tokens) if tokens is not None else [str(t + 1) for t in range(total)], total)

    def draw(t):
        for image, frames in pictures:
            image.set_data(frames[t])
        main.set_xlabel(f"state $S_{{{t + 1}}}$", color=COLORS["state"])
        move(t)

    return film(figure, draw, range(total), alt=alt, fps=fps, still=still)


def _signed(ax, matrix, limit):
    limit = float(np.abs(matrix).max() if limit is None else limit) or 1.0
    image = ax.imshow(matrix, cmap=SIGNED, vmin=-limit, vmax=limit, aspect="auto" if 1 in matrix.shape else "equal")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return image


def _edges(rows, columns):
    """A figure with axes for the state (cells square), for k_t on its left and for v_t above, placed in inches."""
    cell = min(2.6 / rows, 3.2 / columns)
    strip, gap = max(cell, 0.16), 0.1
    width, height = 5.2, rows * cell + gap + strip + 1.2
    left, bottom = (width - columns * cell) / 2, 0.42
    figure = plt.figure(figsize=(width, height))
    figure.set_layout_engine("none")

    def box(x, y, w, h):
        ax = figure.add_axes((x / width, y / height, w / width, h / height))
        ax.set(xticks=[], yticks=[])
        return ax

    main = box(left, bottom, columns * cell, rows * cell)
    key = box(left - gap - strip, bottom, strip, rows * cell)
    value = box(left, bottom + rows * cell + gap, columns * cell, strip)
    key.set_ylabel("key $k_t$", color=COLORS["keys"])
    value.set_title("value $v_t$", color=COLORS["values"], loc="center", pad=4)
    return figure, main, key, value


def _tape(figure, labels, total):
    """The tokens in a row; returns a function that marks one as read."""
    same_size("tokens", len(labels), total, "T")
    height = figure.get_size_inches()[1]
    ax = figure.add_axes((0.03, 1 - 0.4 / height, 0.94, 0.34 / height))
    ax.set(xlim=(0, max(total, 12)), ylim=(0, 1))
    ax.axis("off")
    mark = ax.add_patch(Rectangle((0, 0.02), 1, 0.96, color=COLORS["state"], linewidth=0))
    texts = [
        ax.text(n + 0.5, 0.5, label, ha="center", va="center_baseline", family=token_fonts(), parse_math=False)
        for n, label in enumerate(labels)
    ]

    def move(t):
        mark.set_x(t)
        for n, text in enumerate(texts):
            text.set_color("white" if n == t else INK if n < t else "#A3A8B0")

    return move
