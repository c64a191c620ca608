"""The figures say what they claim, and can be read: on a phone, by the colour-blind, without scripts."""

import base64
import html.parser
import io
import itertools
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")
plt = pytest.importorskip("matplotlib.pyplot")

from matplotlib.colors import to_rgb  # noqa: E402
from PIL import Image  # noqa: E402

from linattn_edu import viz  # noqa: E402
from linattn_edu.viz import player, png  # noqa: E402
from linattn_edu.viz import states as states_module  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error")
TEXT = b"It is a truth universally acknowledged"


@pytest.fixture(autouse=True)
def style():
    with matplotlib.rc_context():
        viz.use_style()
        yield
    plt.close("all")


def memory(T, K=12, V=16):
    """Keys, values and the states S_1 .. S_T of plain linear attention."""
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(T, K)), rng.normal(size=(T, V))
    return keys, values, np.cumsum(keys[:, :, None] * values[:, None], 0)


def weights(N, T):
    scores = 2 * torch.randn(N, T, T, generator=torch.Generator().manual_seed(0))
    return scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)


def map_figure():
    figure, ax = plt.subplots(figsize=(6, 5))
    viz.attention_map(ax, weights(1, 24)[0], TEXT[:24], causal=True)
    return figure


def state_figure():
    figure, ax = plt.subplots()
    viz.state_map(ax, memory(20)[2][-1], title="after 20 tokens")
    return figure


def costs_figure():
    figure, ax = plt.subplots()
    T = 2.0 ** np.arange(8, 15)
    spread = np.random.default_rng(0).lognormal(0, 0.1, (7, 5))
    naive = T[:, None] ** 2 * 1e-6 * spread
    naive[-1] = np.nan
    sdpa, linear = T[:, None] ** 2 * 3e-7 * spread, T[:, None] * 2e-3 * spread
    viz.costs(ax, T, {"naive": naive, "SDPA": sdpa, "linear": linear}, ylabel="time (ms)", slopes=(1, 2))
    return figure


def two_costs_figure():
    figure, axes = plt.subplots(1, 2, figsize=(6, 3))
    T = 2.0 ** np.arange(8, 15)
    for ax, name in zip(axes, ("time (ms)", "memory (MB)")):
        viz.costs(ax, T, {"softmax": T**2 * 1e-6, "linear": T * 2e-3}, ylabel=name)
    return figure


def curves_figure():
    figure, ax = plt.subplots()
    position = np.arange(1, 65)
    entropy = {"softmax": np.log(position) * 0.5, "elu1": np.log(position) * 0.97, "relu": np.log(position) * 0.93}
    viz.curves(ax, position, entropy, xlabel="position", ylabel="entropy (nats)")
    return figure


def bars_figure():
    figure, ax = plt.subplots(figsize=(6, 2.6))
    viz.bars(ax, {"elu1": 0.31, "relu": 0.42, "softmax per token": 0.12}, xlabel="relative error to softmax")
    return figure


def words_figure():
    figure, ax = plt.subplots(figsize=(6, 5))
    viz.attention_map(ax, weights(1, 7)[0], "It is a truth universally acknowledged that".split(), causal=True)
    return figure


FIGURES = {
    "map": map_figure,
    "map of words": words_figure,
    "map of rare bytes": lambda: viz.attention_maps(weights(1, 24), tokens=bytes(range(200, 224))),
    "maps without room for tokens": lambda: viz.attention_maps(weights(2, 24), tokens=TEXT[:24]),
    "maps of 4": lambda: viz.attention_maps(weights(4, 24), [f"head {n}" for n in range(4)], causal=True),
    "maps of 2": lambda: viz.attention_maps(weights(2, 12), ["softmax", "linear"], TEXT[:12], causal=True),
    "maps of 7": lambda: viz.attention_maps(weights(7, 24), [f"head {n}" for n in range(7)]),
    "state": state_figure,
    "strip": lambda: viz.state_strip(memory(20)[2], tokens=TEXT[:20]),
    "strip without tokens": lambda: viz.state_strip(memory(20, 16, 8)[2], times=(1, 5, 10, 20)),
    "bracketing": lambda: viz.bracketing(64, 16, 16),
    "bracketing, long": lambda: viz.bracketing(1024, 64, 128),
    "bracketing, short": lambda: viz.bracketing(8, 32, 16),
    "chunked mask": lambda: viz.chunked_mask(16, 4),
    "chunked mask, many chunks": lambda: viz.chunked_mask(128, 4),
    "chunked mask, ragged": lambda: viz.chunked_mask(22, 4),
    "curves": curves_figure,
    "costs": costs_figure,
    "costs side by side": two_costs_figure,
    "bars": bars_figure,
}


def texts(figure):
    """Every text that is drawn, with its box in pixels."""
    figure.canvas.draw()
    found = [*figure.texts, *filter(None, (figure._supxlabel, figure._supylabel))]
    axes = [ax for ax in figure.findobj(matplotlib.axes.Axes) if ax.get_visible()]
    for ax in axes:
        found += [*ax.texts, *(getattr(ax, name) for name in ("title", "_left_title", "_right_title"))]
        for axis in (ax.xaxis, ax.yaxis) if ax.axison else ():
            low, high = sorted(axis.get_view_interval())
            ticks = [t for t in axis.get_major_ticks() + axis.get_minor_ticks() if low <= t.get_loc() <= high]
            found += [axis.label, *(label for tick in ticks for label in (tick.label1, tick.label2))]
    drawn = {id(text): text for text in found if text.get_visible() and text.get_text().strip()}
    return [(text, text.get_window_extent()) for text in drawn.values()]


# Every figure


class Drawn:
    """A figure, drawn once: its texts with their boxes, and the PNG."""

    def __init__(self, make):
        self.figure = make()
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png")
        self.png = buffer.getvalue()
        self.texts = texts(self.figure)


@pytest.fixture(scope="module", params=FIGURES)
def drawn(request):
    with matplotlib.rc_context():
        viz.use_style()
        return Drawn(FIGURES[request.param])


def test_capital_letters_are_at_least_6_px_high_on_a_phone(drawn):
    renderer, width = drawn.figure.canvas.get_renderer(), drawn.figure.bbox.width
    for text, _ in drawn.texts:
        _, capital, _ = renderer.get_text_width_height_descent("H", text.get_fontproperties(), ismath=False)
        assert capital / width * 360 >= 6, text


def test_no_text_leaves_the_figure_or_touches_another(drawn):
    page = drawn.figure.bbox
    assert len(drawn.texts) > 3
    for text, box in drawn.texts:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= page.x1 + 1 and box.y1 <= page.y1 + 1, text
    for (a, box_a), (b, box_b) in itertools.combinations(drawn.texts, 2):
        overlap = matplotlib.transforms.Bbox.intersection(box_a, box_b)
        assert overlap is None or min(overlap.width, overlap.height) <= 1, (a, b)


def test_a_figure_is_an_opaque_png_of_at_most_60_kB(drawn):
    assert len(drawn.png) <= 60_000
    image = Image.open(io.BytesIO(drawn.png))
    assert np.asarray(image.convert("RGBA"))[..., 3].min() == 255
    assert image.getpixel((0, 0))[:3] == tuple(round(255 * c) for c in to_rgb(viz.PAPER))


@pytest.mark.parametrize("size, worst, mean", [(256, 16, 0.1), (96, 32, 0.6)])
def test_a_palette_keeps_colours_to_within_what_the_eye_sees(drawn, size, worst, mean):
    pixels = np.asarray(Image.open(io.BytesIO(drawn.png)).convert("RGB"))
    decoded = np.asarray(Image.open(io.BytesIO(png.encode(pixels[None], size)[0])).convert("RGB"))
    error = np.abs(decoded.astype(int) - pixels)
    assert error.max() <= worst and error.mean() <= mean


@pytest.mark.parametrize("name", ["map", "strip", "bracketing", "costs"])
def test_a_figure_made_twice_is_the_same_png(name):
    first, second = Drawn(FIGURES[name]).png, Drawn(FIGURES[name]).png
    assert first == second and b"Creation" not in first


# Style


def test_use_style_twice_is_once():
    before = dict(matplotlib.rcParams)
    viz.use_style()
    assert dict(matplotlib.rcParams) == before


# Machado, Oliveira and Fernandes (2009), severity 1.
VISION = {
    "full": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear_rgb(color):
    c = np.array(to_rgb(color))
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def oklab(linear):
    lms = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566]]
    lms.append([0.0883024619, 0.2817188376, 0.6299787005])
    lab = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099]]
    lab.append([0.0259040371, 0.7827717662, -0.8086757660])
    return np.array(lab) @ np.cbrt(np.array(lms) @ np.clip(linear, 0, 1))


def luminance(color):
    return linear_rgb(color) @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize("vision", VISION)
def test_roles_differ_for_every_kind_of_colour_vision(vision):
    seen = {role: oklab(VISION[vision] @ linear_rgb(color)) for role, color in viz.COLORS.items()}
    for a, b in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[a] - seen[b]) >= 0.09, (a, b)


@pytest.mark.parametrize("color", [*viz.COLORS.values(), viz.MUTED])
def test_roles_stand_out_from_the_paper(color):
    assert (luminance(viz.PAPER) + 0.05) / (luminance(color) + 0.05) >= 3


@pytest.mark.parametrize("vision", VISION)
def test_more_weight_is_darker_and_signed_maps_darken_away_from_zero(vision):
    def lightness(cmap, at):
        return np.array([oklab(VISION[vision] @ linear_rgb(cmap(x)))[0] for x in at])

    assert (np.diff(lightness(viz.WEIGHTS, np.linspace(0, 1, 33))) < 0).all()
    assert (np.diff(lightness(viz.SIGNED, np.linspace(0.5, 1, 17))) < 0).all()
    assert (np.diff(lightness(viz.SIGNED, np.linspace(0.5, 0, 17))) < 0).all()
    ends = [oklab(VISION[vision] @ linear_rgb(viz.SIGNED(x))) for x in (0.15, 0.85)]
    assert np.linalg.norm(ends[0] - ends[1]) >= 0.12


def test_chinese_is_drawn_or_else_spelt_in_hexadecimal():
    matplotlib.rcParams["font.family"] = ["DejaVu Sans"]
    assert viz.token_labels("孟") == ["e5", "ad", "9f"]
    viz.use_style()
    if len(matplotlib.rcParams["font.family"]) == 1:
        pytest.skip("no Chinese font on this machine: apt-get install fonts-noto-cjk")
    assert viz.token_labels("孟 A") == ["孟", "·", "·", "␣", "A"]
    figure, ax = plt.subplots()
    ax.set_title("孟子曰")
    figure.canvas.draw()


def test_token_labels():
    assert viz.token_labels(b"a b\n\t") == ["a", "␣", "b", "↵", "⇥"]
    assert viz.token_labels(torch.tensor([105, 0, 200])) == ["i", "00", "c8"]
    assert viz.token_labels("né".encode() + b"\xc3") == ["n", "é", "·", "c3"]
    assert viz.token_labels(["the", " cat"]) == ["the", "␣cat"]
    assert viz.token_labels(b"") == []


def test_dollars_and_spaces_are_labels_as_they_stand():
    figure, ax = plt.subplots()
    viz.attention_map(ax, np.eye(3), ["$x_$", "$", " a"])
    figure.canvas.draw()
    assert [label.get_text() for label in ax.get_xticklabels()] == ["$x_$", "$", "␣a"]


NOTEBOOK = """
import base64, sys
from IPython.terminal.interactiveshell import TerminalInteractiveShell
shell = TerminalInteractiveShell.instance()
shell.display_formatter.active_types = shell.display_formatter.format_types
shell.enable_matplotlib("inline")
from linattn_edu import viz
viz.use_style()
viz.use_style()
png = shell.display_formatter.format(viz.bracketing(64, 16, 16))[0]["image/png"]
open(sys.argv[1], "wb").write(base64.b64decode(png) if isinstance(png, str) else png)
"""


def test_a_notebook_stores_figures_small_and_in_true_colours(tmp_path):
    pytest.importorskip("IPython")
    file, environment = tmp_path / "figure.png", {**os.environ, "IPYTHONDIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", NOTEBOOK, str(file)], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    stored = Image.open(io.BytesIO(file.read_bytes()))
    assert stored.mode == "P" and file.stat().st_size < 20_000
    seen = {color for _, color in stored.convert("RGB").getcolors(1000)}
    roles = [role for role in viz.COLORS if role != "gate"]
    assert seen >= {tuple(round(255 * c) for c in to_rgb(viz.COLORS[role])) for role in roles}


def test_the_package_itself_does_not_import_matplotlib():
    code = "import sys, linattn_edu; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_without_matplotlib_the_error_says_what_to_install():
    code = "import sys; sys.modules['matplotlib'] = None; from linattn_edu import viz"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'pip install "linattn_edu[viz]"' in run.stderr


# Maps and states


def test_an_attention_map_shows_the_weights_and_hides_what_the_mask_removes():
    _, ax = plt.subplots()
    given = torch.rand(5, 5, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert viz.attention_map(ax, given, b"abcde", causal=True) is ax
    drawn = ax.images[0].get_array()
    assert np.array_equal(~drawn.mask, torch.ones(5, 5).tril().bool().numpy())
    assert np.array_equal(drawn.data, given.detach().float().numpy())
    assert [label.get_text() for label in ax.get_yticklabels()] == list("abcde")
    assert [label.get_text() for label in ax.get_xticklabels()] == list("abcde")


def test_a_causal_map_of_late_queries_ends_at_the_last_key():
    _, ax = plt.subplots()
    viz.attention_map(ax, np.ones((2, 5)), causal=True)
    assert np.array_equal(~ax.images[0].get_array().mask, [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])


def test_negative_weights_get_colours_centred_at_zero():
    _, ax = plt.subplots()
    viz.attention_map(ax, [[-1.0, 1.0], [0.0, 2.0]])
    image = ax.images[0]
    assert image.cmap.name == viz.SIGNED.name and image.norm(0.0) == 0.5 and image.norm(2.0) == 1.0
    viz.attention_map(ax, [[0.0, 1.0], [0.5, 0.5]])
    assert ax.images[1].norm(0.0) == 0.0 and ax.images[1].norm(1.0) == 1.0


def test_tokens_label_a_map_only_where_they_fit():
    def labels(T, tokens):
        _, ax = plt.subplots(figsize=(6, 5))
        viz.attention_map(ax, np.eye(T), tokens)
        return [label.get_text() for label in ax.get_yticklabels()]

    assert labels(24, TEXT[:24]) == viz.token_labels(TEXT[:24])
    assert labels(38, TEXT) != viz.token_labels(TEXT) and len(labels(38, TEXT)) < 10


def test_a_list_of_tensors_is_a_tensor():
    """Of any dtype, and with a graph: states collected in a loop are drawn as they are."""
    states = [torch.eye(3, dtype=torch.bfloat16).requires_grad_(), 2 * torch.eye(3)]
    figure = viz.state_strip(states, times=[1, 2])
    assert [ax.images[0].get_array().max() for ax in figure.axes[:2]] == [1, 2]
    _, ax = plt.subplots()
    viz.curves(ax, [0, 1], {"a": [states[0][0, 0], torch.tensor(3)]}, xlabel="x", ylabel="y")
    assert ax.lines[0].get_ydata().tolist() == [1, 3]


def test_maps_share_one_scale():
    figure = viz.attention_maps(np.stack([np.eye(3), 4 * np.eye(3)]), ["a", "b"])
    images = [ax.images[0] for ax in figure.axes[:2]]
    assert [image.norm.vmax for image in images] == [4, 4]
    assert [ax.get_title(loc="left") for ax in figure.axes[:2]] == ["a", "b"]
    assert np.array_equal(images[1].get_array(), 4 * np.eye(3))


def test_a_strip_shows_the_states_it_names():
    _, _, states = memory(20)
    figure = viz.state_strip(states, times=(1, 7, 20), tokens=TEXT[:20])
    for ax, t in zip(figure.axes, (1, 7, 20)):
        image = ax.images[0]
        assert np.array_equal(image.get_array(), states[t - 1])
        assert image.norm.vmax == -image.norm.vmin == np.abs(states).max()
        assert ax.get_title(loc="left") == f"t = {t}\nafter {viz.token_labels(TEXT)[t - 1]}"


# Schemes


@pytest.mark.parametrize("T, K, V", [(64, 16, 16), (128, 8, 32), (8, 32, 16)])
def test_bracketings_are_to_scale_and_count_right(T, K, V):
    figure = viz.bracketing(T, K, V)
    scores, state = figure.axes
    shapes = {"Q": (T, K), "K^T": (K, T), "A": (T, T), "V": (T, V), "S": (K, V), "O": (T, V)}
    inches = set()
    for ax, names in ((scores, ["Q", "K^T", "A", "V", "O"]), (state, ["K^T", "V", "S", "Q", "S", "O"])):
        assert [patch.get_gid() for patch in ax.patches] == names
        for patch in ax.patches:
            box, (rows, columns) = patch.get_window_extent(), shapes[patch.get_gid()]
            inches |= {round(box.height / rows, 6), round(box.width / columns, 6)}
    assert len(inches) == 1
    assert f"{T * K * T + T * T * V:,} multiplications" in scores.texts[0].get_text()
    assert f"{K * T * V + T * K * V:,} multiplications" in state.texts[0].get_text()


@pytest.mark.parametrize("T, C", [(16, 4), (22, 4), (5, 8), (3, 1)])
def test_chunked_mask_is_the_causal_mask_and_its_diagonal_blocks(T, C):
    drawn = torch.tensor(viz.chunked_mask(T, C).axes[0].images[0].get_array().data)
    assert torch.equal(drawn > 0, torch.ones(T, T).tril().bool())
    blocks = torch.block_diag(*[torch.ones(min(C, T - i), min(C, T - i)) for i in range(0, T, C)])
    assert torch.equal(drawn == 2, blocks.tril().bool())


# Curves


def test_costs_draw_medians_bands_and_guides():
    figure, ax = plt.subplots()
    x = np.array([1.0, 2.0, 4.0])
    runs = np.array([[1.0, 6.0, 2.0], [8.0, 9.0, 4.0], [np.nan, 1.0, 1.0]])
    viz.costs(ax, x, {"a": runs, "b": torch.tensor([1.0, 2.0, 4.0])}, ylabel="time (s)", slopes=(1,))
    a, b, guide = ax.lines
    assert a.get_xdata().tolist() == [1, 2] and a.get_ydata().tolist() == [2, 8]
    assert b.get_ydata().tolist() == [1, 2, 4]
    band = ax.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == 1 and band[:, 1].max() == 9
    slope = np.diff(np.log(guide.get_ydata())) / np.diff(np.log(guide.get_xdata()))
    assert np.allclose(slope, 1) and (guide.get_ydata() < guide.get_xdata()).all()
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "2", "4"]
    assert sorted(text.get_text() for text in ax.texts) == ["$\\propto T$", "a", "b"]


def test_curves_are_named_at_their_ends():
    figure, ax = plt.subplots()
    series = {"a": [-1.0, 0, 1], "b": [0.0, 5, 5]}
    viz.curves(ax, [0, 1, 2], series, xlabel="position", ylabel="error", colors={"b": "red"})
    assert [line.get_ydata().tolist() for line in ax.lines] == [[-1, 0, 1], [0, 5, 5]]
    assert {text.get_text(): text.xy for text in ax.texts} == {"a": (2, 1), "b": (2, 5)}
    assert ax.lines[1].get_color() == "red" == ax.texts[1].get_color()
    assert ax.get_yscale() == "linear"


def test_lines_drawn_before_are_not_named():
    figure, ax = plt.subplots()
    ax.axhline(1)
    viz.curves(ax, [0, 1], {"a": [0.0, 2.0]}, xlabel="x", ylabel="y")
    assert [text.get_text() for text in ax.texts] == ["a"]


def test_bars_carry_their_numbers():
    _, ax = plt.subplots()
    viz.bars(ax, {"elu1": 0.3141, "relu": 2}, xlabel="error", form="{:.2f}")
    assert [bar.get_width() for bar in ax.patches] == [0.3141, 2]
    assert [text.get_text() for text in ax.texts] == ["0.31", "2.00"]
    assert ax.yaxis_inverted()


# Films


class Page(html.parser.HTMLParser):
    def __init__(self, source):
        super().__init__()
        self.tags = []
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def all(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


def state_film(T=24, K=16, V=16, **options):
    keys, values, states = memory(T, K, V)
    options = {"alt": 'S fills, "token" by token', "tokens": TEXT[:T], **options}
    return viz.state_film(torch.tensor(states), keys=torch.tensor(keys), values=values, **options)


def stills(film):
    """Every frame as pixels; the one that the page shows at rest stands in its `src` alone."""
    (img,) = Page(film.html).all("img")
    frames = re.search(r"const frames = \[(.*?)\]", film.html)[1].split(",")
    encoded = [frame.strip('"') or img["src"].removeprefix("data:image/png;base64,") for frame in frames]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(shot))).convert("RGB")) for shot in encoded]


def test_a_film_is_one_page_fragment_that_needs_nothing_else():
    film = state_film()
    assert len(film.html) <= 150_000 and film._repr_html_() == film.html and film.frames == 24
    assert "http" not in film.html and "<link" not in film.html
    page = Page(film.html)
    (img,) = page.all("img")
    assert img["alt"] == film.alt == 'S fills, "token" by token' and "max-width:100%" in img["style"]
    assert [button["aria-label"] for button in page.all("button")] == ["Previous frame", "Play", "Next frame"]
    assert all(button["title"] == button["aria-label"] for button in page.all("button"))
    assert page.all("input")[0]["aria-label"] == "Frame"
    assert len(repr(film)) < 100


def test_equal_films_are_equal_byte_for_byte_and_others_have_another_id():
    first, second, other = state_film(T=3), state_film(T=3), state_film(T=4)
    assert first.html == second.html

    def name(film):
        return Page(film.html).all("div")[0]["data-film"]

    assert name(first) != name(other)


def test_a_film_shows_each_frame_and_rests_on_the_still():
    figure = plt.figure(figsize=(1, 1))
    colors = ["#102030", "#405060", "#708090"]
    film = viz.film(figure, figure.set_facecolor, colors, alt="three colours", still=1)
    frames = stills(film)
    assert [tuple(frame[5, 5]) for frame in frames] == [(16, 32, 48), (64, 80, 96), (112, 128, 144)]
    (slider,) = Page(film.html).all("input")
    assert (slider["value"], slider["max"]) == ("1", "2")
    assert not plt.fignum_exists(figure.number)


def test_all_frames_share_one_palette():
    figure = plt.figure(figsize=(1, 1))
    film = viz.film(figure, figure.set_facecolor, ["#102030", "#405060"], alt="two colours")
    (img,) = Page(film.html).all("img")
    first, last = re.search(r'frames = \["(.+?)",""\]', film.html)[1], img["src"].removeprefix("data:image/png;base64,")
    palettes = [Image.open(io.BytesIO(base64.b64decode(shot))).getpalette() for shot in (first, last)]
    assert palettes[0] == palettes[1] and len(palettes[0]) >= 6


def test_a_film_keeps_colours_to_within_what_the_eye_sees(monkeypatch):
    exact = []
    monkeypatch.setattr(player, "encode", lambda shots, size: exact.append(shots) or png.encode(shots, size))
    error = np.abs(np.stack(stills(state_film(T=6))).astype(int) - exact)
    assert error.max() <= 32 and error.mean() <= 0.6


def test_a_state_film_draws_state_key_and_value_of_each_token(monkeypatch):
    seen = []
    monkeypatch.setattr(states_module, "film", lambda figure, draw, frames, **_: seen.append((figure, draw, frames)))
    keys, values, states = memory(5, 3, 4)
    viz.state_film(states, keys=keys, values=values, tokens=TEXT[:5], alt="x")
    figure, draw, frames = seen[0]
    main, key, value = figure.axes[:3]
    assert list(frames) == list(range(5))
    for t in frames:
        draw(t)
        assert np.array_equal(main.images[0].get_array(), states[t])
        assert np.array_equal(key.images[0].get_array(), keys[t][:, None])
        assert np.array_equal(value.images[0].get_array(), values[t][None])
    for ax in (main, key, value):
        assert ax.images[0].norm(0.0) == 0.5
    assert main.images[0].norm.vmax == np.abs(states).max()
    figure.canvas.draw()
    cell = main.bbox.height / 3
    assert main.bbox.width == pytest.approx(4 * cell)
    assert (key.bbox.y0, key.bbox.height) == pytest.approx((main.bbox.y0, main.bbox.height))
    assert (value.bbox.x0, value.bbox.width) == pytest.approx((main.bbox.x0, main.bbox.width))


@pytest.mark.parametrize("T, K, V", [(24, 16, 16), (6, 4, 24), (12, 24, 4)])
def test_a_state_film_can_be_read_on_a_phone(monkeypatch, T, K, V):
    seen = []
    monkeypatch.setattr(states_module, "film", lambda figure, draw, frames, **_: seen.append((figure, draw)))
    state_film(T, K, V)
    figure, draw = seen[0]
    draw(T - 1)
    test_capital_letters_are_at_least_6_px_high_on_a_phone(frame := Drawn(lambda: figure))
    test_no_text_leaves_the_figure_or_touches_another(frame)


def test_a_film_plays_in_a_browser_and_stands_still_without_scripts(tmp_path, chromium):
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    film = state_film(T=4, fps=20)
    page_file = tmp_path / "film.html"
    page_file.write_text(f"<!doctype html><meta charset=utf-8><body>{film.html}{film.html}", encoding="utf-8")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 360, "height": 640})
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(page_file.as_uri())
        first, second = page.locator(".animation").all()
        still = first.locator("img").get_attribute("src")
        box = first.locator("img").bounding_box()
        assert box["width"] <= 360
        assert box["width"] / box["height"] == pytest.approx(page.evaluate(
            "(({naturalWidth, naturalHeight}) => naturalWidth / naturalHeight)(document.querySelector('img'))"
        ), rel=0.01)  # fmt: skip
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        seen = page.evaluate("""async () => {
            const film = document.querySelector(".animation"), img = film.querySelector("img"), seen = [];
            new MutationObserver(() => seen.push(img.src)).observe(img, {attributeFilter: ["src"]});
            film.querySelector('[title="Play"]').click();
            await new Promise(done => setTimeout(done, 1000));
            return seen;
        }""")
        assert len(set(seen)) == 4 and seen[-1] == still
        assert first.get_by_title("Play", exact=True).count() == 1
        first.get_by_title("Previous frame").click()
        assert first.locator("input").input_value() == "2" and second.locator("input").input_value() == "3"
        second.locator("input").fill("0")
        assert second.locator("img").get_attribute("src") == seen[0]
        assert errors == []
        quiet = browser.new_context(java_script_enabled=False).new_page()
        quiet.goto(page_file.as_uri())
        assert quiet.locator("img").first.get_attribute("src") == still
        assert not quiet.locator("button").first.is_visible()
        browser.close()


# Bad input


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda ax: viz.attention_map(ax, np.ones((1, 3, 3))), r"`weights`: .* \[1, 3, 3\], expected \[Tq, Tk\]"),
        (lambda ax: viz.attention_map(ax, np.eye(3), b"ab"), "`tokens_q`: got 2, expected T = 3"),
        (lambda ax: viz.attention_maps(np.ones((2, 3, 3)), ["a"]), "`titles`: got 1, expected N = 2"),
        (lambda ax: viz.attention_maps(np.ones((2, 3, 3)), columns=0), "`columns`: got 0, expected a whole number"),
        (lambda ax: viz.bars(ax, [1.0], xlabel=""), r"`values`: got list \[1.0\], expected a mapping from names"),
        (lambda ax: viz.state_map(ax, np.ones(3)), r"`state`: got shape \[3\], expected \[K, V\]"),
        (lambda ax: viz.state_strip(np.ones((4, 2, 2)), times=[5]), r"`times`: got \[5\], expected .* from 1 to T = 4"),
        (lambda ax: viz.state_strip(np.ones((4, 2, 2)), tokens=b"abc"), "`tokens`: got 3, expected T = 4"),
        (lambda ax: viz.state_film(np.ones((25, 2, 2)), alt="x"), "`states`: got T = 25, expected at most 24"),
        (lambda ax: viz.state_film(np.ones((0, 2, 2)), alt="x"), r"`states`: got shape \[0, 2, 2\]"),
        (lambda ax: viz.state_film(np.ones((2, 2, 2)), alt="x", keys=np.ones((3, 2))), r"`keys`: .*\[3, 2\]"),
        (lambda ax: viz.state_film(np.ones((2, 2, 3)), alt="x", values=np.ones((2, 2))), r"`values`: .*\[2, 2\]"),
        (lambda ax: viz.film(ax.figure, id, [], alt="x"), "`frames`: got none"),
        (lambda ax: viz.state_strip(np.ones((4, 2, 2)), times=[]), r"`times`: got \[\], expected .* at least one"),
        (lambda ax: viz.state_strip(np.ones((4, 2, 2)), times=[1.5]), r"`times`: got \[1.5\], expected whole numbers"),
        (lambda ax: viz.state_map(ax, [[1.0, 2.0], [3.0]]), r"`state`: got list .*, expected numbers \[K, V\]"),
        (lambda ax: viz.token_labels([300]), r"`tokens`: got list \[300\], expected bytes, .* from 0 to 255"),
        (lambda ax: viz.token_labels(["a", 98]), r"`tokens`: got list \['a', 98\], expected bytes, "),
        (lambda ax: viz.token_labels([1.5]), r"`tokens`: got list \[1.5\], expected bytes, "),
        (lambda ax: viz.film(ax.figure, id, [1], alt=" "), "`alt`: got an empty text"),
        (lambda ax: viz.film(ax.figure, id, [1, 2], alt="x", still=2), "`still`: got 2, expected .* from -2 to 1"),
        (lambda ax: viz.film(ax.figure, id, [1], alt="x", fps=0), "`fps`: got 0, expected a finite positive number"),
        (lambda ax: viz.costs(ax, [1, 2], {}, ylabel="s"), r"`series`: got dict {}, expected a mapping"),
        (lambda ax: viz.curves(ax, [1], [1.0], xlabel="", ylabel=""), r"`series`: got list .*, expected a mapping"),
        (lambda ax: viz.bracketing(0, 4, 4), "`T`: got 0, expected a whole number of at least 1"),
        (lambda ax: viz.chunked_mask(8, 2.5), "`C`: got 2.5, expected a whole number of at least 1"),
        (lambda ax: viz.costs(ax, [1, 2], {"a": [1.0]}, ylabel="s"), r"`series\['a'\]`: .* \[X, repeats\] with X = 2"),
        (lambda ax: viz.curves(ax, [1], {"a": [np.nan]}, xlabel="", ylabel=""), r"`series\['a'\]`: got NaN alone"),
        (lambda ax: viz.costs(ax, [1, 2], {"a": [0.0, 1.0]}, ylabel="s"), r"`series\['a'\]`: .* positive"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(plt.figure().add_subplot())
