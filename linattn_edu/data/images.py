"""Handwritten digits, 8 x 8 pixels: images small enough to be sequences of pixels."""

import lzma
from importlib.resources import files

import numpy as np
import torch

SHA256 = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"
DIGITS = """digits: Optical recognition of handwritten digits, E. Alpaydin and C. Kaynak, 1998
  1,797 images, the test set of the UCI data set 80
  origin: scikit-learn 1.9.1, sklearn/datasets/data/digits.csv.gz, byte for byte
  rights: CC BY 4.0 (UCI Machine Learning Repository)"""


def digits(split: str = "train") -> tuple[torch.Tensor, torch.Tensor]:
    """Images [N, 8, 8], float32 from 0 to 1, and what they show, [N] int64: 1438 in "train", 359 in "test".

    Every fifth image is a test image. All are of the same 13 writers: a test image is new, its hand is not.
    """
    if split not in ("train", "test"):
        raise ValueError(f"`split`: got {split!r}, expected 'train' or 'test'")
    raw = lzma.decompress(files(__package__).joinpath("tables", "digits.csv.xz").read_bytes())
    table = torch.from_numpy(np.loadtxt(raw.decode("ascii").splitlines(), delimiter=",", dtype=np.float32))
    chosen = (torch.arange(len(table)) % 5 == 4) == (split == "test")
    return table[chosen, :64].view(-1, 8, 8) / 16, table[chosen, 64].long()
