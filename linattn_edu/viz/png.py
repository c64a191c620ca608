"""Pictures as PNGs with a palette: a third of the size, and alike to the eye."""

import io

import numpy as np
from PIL import Image


def shoot(figure, **options):
    """The figure as pixels [height, width, 3]; `options` are those of `savefig`."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", **options)
    return np.asarray(Image.open(buffer).convert("RGB"))


def encode(shots, size):
    """Pictures [N, height, width, 3] as PNGs with one palette of `size` colours, so that a film does not flicker."""
    codes, inverse, counts = np.unique(shots @ (1 << np.array([16, 8, 0])), return_inverse=True, return_counts=True)
    colors = np.stack([codes >> 16, codes >> 8 & 255, codes & 255], 1)
    nearest, palette = _palette(colors, counts, size)
    pngs = []
    for indices in nearest[inverse].reshape(shots.shape[:3]):
        image, buffer = Image.fromarray(indices), io.BytesIO()
        image.putpalette(palette.astype(np.uint8).tobytes())
        image.save(buffer, "PNG", optimize=True)
        pngs.append(buffer.getvalue())
    return pngs


def _palette(colors, counts, size):
    """At most `size` of `colors [M, 3]`, each time the one most missed, and for each colour the nearest.

    Median cut, Pillow's default, is led by areas: it turns the letters of a small label to the colour of a large cell.
    """
    palette, error, nearest = [], np.full(len(colors), np.inf), np.zeros(len(colors), np.uint8)
    while len(palette) < size and error.any():
        worst = np.argmax(error * np.sqrt(counts) if palette else counts)
        distance = np.square(colors - colors[worst]).sum(1)
        closer = distance < error
        nearest[closer], error[closer] = len(palette), distance[closer]
        palette.append(colors[worst])
    return nearest, np.array(palette)
