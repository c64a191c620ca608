"""Films that play in a page without any other file: a still, and with scripts on also a player."""

import base64
import hashlib
import html
from dataclasses import dataclass, field
from string import Template

import matplotlib.pyplot as plt
import numpy as np

from linattn_edu import validate

from .png import encode, shoot

PALETTE_SIZE = 96

# `animation` is the class that matplotlib's own player has too. U+FE0E keeps the triangle from becoming an emoji.
PLAYER = Template("""\
<div class="animation" data-film="$id" style="max-width:100%; text-align:center">
<img src="$still" alt="$alt" width="$width" height="$height" style="max-width:100%; height:auto">
<div hidden>
<button type="button" title="Previous frame" aria-label="Previous frame" style="$touch">&#x2039;</button>
<button type="button" title="Play" aria-label="Play" style="$touch">&#x25B6;&#xFE0E;</button>
<button type="button" title="Next frame" aria-label="Next frame" style="$touch">&#x203A;</button>
<input type="range" min="0" max="$last" value="$start" aria-label="Frame" style="width:50%; vertical-align:middle">
</div>
<script>
for (const film of document.querySelectorAll('[data-film="$id"]')) {
  const img = film.querySelector("img"), slider = film.querySelector("input"), png = "data:image/png;base64,";
  const frames = [$frames].map(f => Object.assign(new Image(), {src: f ? png + f : img.src}));
  const [back, play, next] = film.querySelectorAll("button");
  let timer = null;
  const show = n => { slider.value = n = (n + frames.length) % frames.length; img.src = frames[n].src; };
  const run = on => {
    clearInterval(timer);
    timer = on ? setInterval(() => slider.value === slider.max ? run(false) : show(+slider.value + 1), $ms) : null;
    play.title = on ? "Pause" : "Play";
    play.setAttribute("aria-label", play.title);
    play.textContent = on ? "\\u275A\\u275A" : "\\u25B6\\uFE0E";
  };
  back.onclick = () => { run(false); show(slider.value - 1); };
  next.onclick = () => { run(false); show(+slider.value + 1); };
  slider.oninput = () => { run(false); show(+slider.value); };
  play.onclick = () => { if (!timer && slider.value === slider.max) show(0); run(!timer); };
  slider.parentElement.hidden = false;
}
</script>
</div>
""")


@dataclass(frozen=True)
class Film:
    """An animation; as the last value of a notebook cell it shows itself."""

    alt: str
    frames: int
    html: str = field(repr=False)

    def _repr_html_(self):
        return self.html


def film(figure, draw, frames, *, alt, fps=2.0, still=-1):
    """Call `draw(frame)`, which changes `figure`, for each of `frames`, and return the Film; `figure` is then closed.

    The page shows frame number `still` until the reader presses Play, and wherever scripts are off. `alt` says in
    words what the film shows. Equal frames give equal HTML, byte for byte.
    """
    frames = list(frames)
    if not frames:
        raise ValueError("`frames`: got none, expected at least one")
    if not alt.strip():
        raise ValueError("`alt`: got an empty text, expected what the film shows, in words")
    fps = validate.number("fps", fps, positive=True)
    start = validate.count("still", still, least=-len(frames), most=len(frames) - 1) % len(frames)
    shots = []
    for frame in frames:
        draw(frame)
        shots.append(shoot(figure, dpi=96))
    plt.close(figure)
    height, width, _ = shots[0].shape
    encoded = [base64.b64encode(png).decode() for png in encode(np.stack(shots), PALETTE_SIZE)]
    frames = ",".join(f'"{png if n != start else ""}"' for n, png in enumerate(encoded))
    return Film(alt, len(shots), PLAYER.substitute(
        id=hashlib.sha256("".join(encoded).encode()).hexdigest()[:12], frames=frames, start=start, last=len(shots) - 1,
        still="data:image/png;base64," + encoded[start], alt=html.escape(alt), width=width, height=height,
        ms=round(1000 / fps), touch="min-width:2.4em; min-height:2.4em",
    ))  # fmt: skip
