"""The look of every figure: colours by role, two colour maps, text that stays legible on a phone."""

import sys

import matplotlib
from matplotlib import font_manager
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from .png import encode, shoot

PAPER = "#FDFDFB"
INK = "#1F2328"
MUTED = "#6B7280"

# Chosen so that any two differ by at least 0.09 in OKLab for full, protan, deutan and tritan vision, and each has a
# contrast of at least 3 on PAPER.
COLORS = {
    "queries": "#2450C4",
    "keys": "#CF6400",
    "values": "#00897F",
    "state": "#54157F",
    "output": INK,
    "gate": "#CF68D2",
    "error": "#98242B",
}

WEIGHTS = LinearSegmentedColormap.from_list("weights", [PAPER, "#BFD0F2", "#6E90E0", COLORS["queries"], "#0E1F55"])
SIGNED = LinearSegmentedColormap.from_list(
    "signed", ["#5E3A00", "#B9791A", "#EBCF9E", "#F7F6F3", "#CDB8E0", "#8A55B0", COLORS["state"]]
)

CJK_FONTS = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei", "PingFang SC", "Heiti SC", "Microsoft YaHei", "SimHei", "Arial Unicode MS",
)  # fmt: skip

# 6 inches wide: on a phone 360 px wide one inch is 60 px, so 10.5 pt text is 8.75 px high.
STYLE = {
    "figure.figsize": (6.0, 3.7),
    "figure.dpi": 120,
    "figure.facecolor": PAPER,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.06,
    "savefig.dpi": "figure",
    "axes.facecolor": PAPER,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.prop_cycle": matplotlib.cycler(color=[COLORS[role] for role in COLORS if role != "output"]),
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.labelsize": 11,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "legend.fontsize": 10.5,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "grid.color": "#E5E5E0",
    "grid.linewidth": 0.8,
    "image.interpolation": "nearest",
    "svg.hashsalt": "linattn_edu",
}


def use_style():
    """Apply the book's style to every figure made from here on; calling it again changes nothing.

    Chinese text is drawn when the machine has a font for it (`CJK_FONTS`).
    """
    installed = set(font_manager.get_font_names())
    cjk = [name for name in CJK_FONTS if name in installed]
    matplotlib.rcParams.update(STYLE)
    matplotlib.rcParams["font.family"] = ["DejaVu Sans", *cjk[:1]]
    _store_with_palette()


def _store_with_palette():
    """In a notebook, store figures as PNGs with a palette of 256 colours."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and "inline" in matplotlib.get_backend():
        import matplotlib_inline.backend_inline  # noqa: F401  (its first import sets the formatter that this replaces)

        shell.display_formatter.formatters["image/png"].for_type(Figure, _inline_png)


def _inline_png(figure):
    return encode(shoot(figure, bbox_inches="tight")[None], 256)[0]
