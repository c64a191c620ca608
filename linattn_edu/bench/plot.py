"""The table of `python -m linattn_edu.bench` as a figure: a point a form, filled for the device, hollow for wall time."""

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator

from linattn_edu.viz import COLORS, use_style

ROLES = {
    "fused": "queries", "step": "queries", "FLA": "keys", "SDPA": "values", "chunkwise": "state", "parallel": "error",
    "copy": "output",
}  # fmt: skip


def plot(rows, about, path):
    """Draw one panel a pass, one line an operator and shape, and save the figure."""
    use_style()
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    cells = list(dict.fromkeys(cell(row) for row in rows))
    height = 1.6 + 0.26 * len(cells)
    figure, axes = plt.subplots(1, len(passes), figsize=(3.2 + 3.2 * len(passes), height), sharey=True, squeeze=False)
    for ax, name in zip(axes[0], passes):
        for row in rows:
            if row["pass"] == name and row["wall_ms"]:
                draw(ax, row, cells.index(cell(row)))
        ax.set(xscale="log", xlabel="ms", title=name)
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=6))
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        ax.xaxis.set_minor_locator(NullLocator())
        ax.grid(axis="x")
    axes[0][0].set_yticks(range(len(cells)), [f"{op} {size}" for op, size in cells])
    axes[0][0].set_ylim(len(cells) - 0.5, -0.5)
    entries = {label: handle for ax in axes[0] for handle, label in zip(*ax.get_legend_handles_labels())}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4)
    figure.suptitle(f"{about['machine']}, {about['dtype']}, {about['date']}; filled: device, hollow: wall time", fontsize=9)
    figure.savefig(path)
    plt.close(figure)


def cell(row):
    return row["op"].replace("_", " "), f"{row['B']}x{row['T']}x{row['HV']}x{row['K']}"


def draw(ax, row, y):
    color = COLORS[ROLES.get(row["form"], "gate")]
    ax.plot(float(row["wall_ms"]), y, "o", mec=color, mfc="none", label=None if row["device_ms"] else row["form"])
    if row["device_ms"]:
        ax.plot(float(row["device_ms"]), y, "o", color=color, label=row["form"])
