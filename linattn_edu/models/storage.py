"""Weights in one small file: float16 arrays by name, compressed; and the model that ships with the package."""

import io
import json
import lzma
import os
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch

from linattn_edu.models.byte_lm import ByteLM, ByteLMConfig

SUFFIX = ".npz.xz"
PRETRAINED = ("softmax", "linear")
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


def pretrained_record(mixer: str = "softmax") -> dict:
    """How a shipped model was made: command, configuration, seed, steps, losses, machine, versions, date, sha256."""
    return json.loads(_shipped(mixer, ".json").read_text("utf-8"))


def pretrained(mixer: str = "softmax") -> ByteLM:
    """A shipped model, trained on Emma and Sense and Sensibility; eval mode, float32, on the CPU.

    "softmax" and "linear" (ELU+1) differ in the mixer alone: both rotate q and k by position, with the same sizes,
    data and steps. They read at most `pretrained_record(mixer)["length"]` bytes well: RoPE met no larger distance.
    """
    return load(_shipped(mixer, SUFFIX).read_bytes(), ByteLMConfig(**pretrained_record(mixer)["config"]))


def _shipped(mixer, suffix):
    if mixer not in PRETRAINED:
        raise ValueError(f"`mixer`: got {mixer!r}, expected one of {', '.join(PRETRAINED)}")
    return files(__package__).joinpath("weights", f"byte_lm_{mixer}{suffix}")
