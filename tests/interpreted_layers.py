"""The layers on the kernels: on a GPU, or under TRITON_INTERPRET=1 in a process of its own, as tests/test_layers.py does.

`python -m pytest tests/interpreted_layers.py` on a machine with a GPU checks one training step of every layer.
"""

import pytest
import torch
from test_layers import RECURRENT, layer_of, tokens

from linattn_edu.kernels import mode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T = 80 if DEVICE == "cuda" else 20
MASK = torch.arange(T, device=DEVICE) >= torch.tensor([0, 7, T - 1], device=DEVICE)[:, None]
DTYPES = {"float32": 1e-5, "bfloat16": 0.02} if DEVICE == "cuda" else {"float32": 1e-5}  # Frobenius norm, relative
PADDED = [False, True] if DEVICE == "cuda" else [True]
WITH_KERNELS = [name for name in RECURRENT if name not in ("Mamba", "ShortConvolution")]


def test_the_kernels_run():
    assert mode() in ("gpu", "interpret")


def training_step(layer, form, x, **options):
    """y, the tensors of the cache and every gradient of one step that starts from a cache."""
    layer.form = form
    layer.zero_grad()
    x = x.clone().requires_grad_()
    _, cache = layer(x[:, :3], **{key: mask[:, :3] for key, mask in options.items()})
    y, cache = layer(x[:, 3:], cache=cache, **{key: mask[:, 3:] for key, mask in options.items()})
    weight = tokens(T, seed=5).to(x)[:, 3:]
    ((y * weight).sum() + sum(s.square().sum() for s in cache.tensors if s.dtype == torch.float32)).backward()
    return {"y": y, **dict(enumerate(cache.tensors)), "dx": x.grad, **{key: p.grad for key, p in layer.named_parameters()}}


@pytest.mark.parametrize("padded", PADDED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_a_training_step_with_kernels_is_that_of_chunkwise(name, dtype, padded):
    layer = layer_of(name, getattr(torch, dtype)).to(DEVICE)
    x, options = tokens(T).to(DEVICE, getattr(torch, dtype)), {"mask": MASK} if padded else {}
    expected = training_step(layer, "chunkwise", x, **options)
    for key, got in training_step(layer, "fused", x, **options).items():
        if got.is_floating_point():
            got, want = got.double(), expected[key].double()
            error = (got - want).norm() / want.norm()
            assert error < DTYPES[dtype], f"{key}: {error:.1e}"
