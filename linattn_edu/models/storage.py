"""Weights in one small file: float16 arrays by name, compressed; and the model that ships with the package."""

import io
import json
import lzma
import os
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch

from .byte_lm import ByteLM, ByteLMConfig

SUFFIX = ".npz.xz"
# A literal's context tells even from odd bytes: a float16's high byte is far from random, its low byte is random.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 3, "lp": 1, "pb": 1}]


def save(model: ByteLM, path: str | os.PathLike) -> bytes:
    """Write the weights, rounded to float16, to `path` and return the file's bytes."""
    parameters = dict(model.named_parameters())  # a tied head is named once
    buffer = io.BytesIO()
    np.savez(buffer, **{name: p.detach().half().cpu().numpy() for name, p in parameters.items()})
    packed = lzma.compress(buffer.getvalue(), filters=_FILTERS)
    Path(path).write_bytes(packed)
    return packed


def load(packed: bytes, config: ByteLMConfig) -> ByteLM:
    """The float32 model in eval mode whose weights `save` returned."""
    model = ByteLM(config).eval()
    with np.load(io.BytesIO(lzma.decompress(packed)), allow_pickle=False) as arrays:
        weights = {name: torch.from_numpy(arrays[name]).float() for name in arrays.files}
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    got = {name: tuple(w.shape) for name, w in weights.items()}
    if got != expected:
        differing = sorted(name for name in got.keys() | expected.keys() if got.get(name) != expected.get(name))
        raise ValueError(f"`packed`: weights {', '.join(differing)} differ from what `config` expects")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    return model


def pretrained_record() -> dict:
    """How the shipped model was made: command, configuration, seed, steps, losses, versions, date, sha256."""
    return json.loads(files(__package__).joinpath("weights", "byte_lm.json").read_text("utf-8"))


def pretrained() -> ByteLM:
    """The shipped softmax model, trained on Emma and Sense and Sensibility; eval mode, float32, on the CPU.

    It reads at most `pretrained_record()["length"]` bytes well: RoPE met no larger distance in training.
    """
    packed = files(__package__).joinpath("weights", "byte_lm" + SUFFIX).read_bytes()
    return load(packed, ByteLMConfig(**pretrained_record()["config"]))
