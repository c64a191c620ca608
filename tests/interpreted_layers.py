"""The layers on the kernels: on a GPU, or under TRITON_INTERPRET=1 in a process of its own, for tests/test_layers.py.

`python -m pytest tests/interpreted_layers.py` on a machine with a GPU checks one training step of every layer.
"""

import pytest
import torch
from test_layers import LAYERS, RECURRENT, layer_of, tokens

from linattn_edu.kernels import mode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T = 80 if DEVICE == "cuda" else 20
MASK = torch.arange(T, device=DEVICE) >= torch.tensor([0, 7, T - 1], device=DEVICE)[:, None]
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
    gradients = {key: p.grad for key, p in layer.named_parameters()}
    return {"y": y, **dict(enumerate(cache.tensors)), "dx": x.grad, **gradients}


def errors(got, expected):
    """Error of each tensor in the Frobenius norm, relative."""
    pairs = {key: (x.double(), expected[key].double()) for key, x in got.items() if x.is_floating_point()}
    return {key: ((x - y).norm() / y.norm()).item() for key, (x, y) in pairs.items()}


@pytest.mark.parametrize("padded", PADDED)
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_a_training_step_with_kernels_is_that_of_chunkwise(name, padded):
    layer, x = layer_of(name, torch.float32).to(DEVICE), tokens(T).to(DEVICE, torch.float32)
    options = {"mask": MASK} if padded else {}
    expected = training_step(layer, "chunkwise", x, **options)
    for key, error in errors(training_step(layer, "fused", x, **options), expected).items():
        assert error < 1e-5, f"{key}: {error:.1e}"


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_gpu_computes_what_a_cpu_does(name):
    """In float64: padded, packed with bounds on either device, and one token more."""
    results = []
    for device in ("cpu", DEVICE):
        layer, x, row = layer_of(name).to(device), tokens(9).to(device), tokens(9, B=1).to(device)
        y, cache = layer(x, mask=MASK[:, :9].to(device))
        step, cache = layer(x[:, :1], cache=cache)
        for place in {"cpu", device}:
            packed, packed_cache = layer(row, cu_seqlens=torch.tensor([0, 4, 4, 9], device=place))
            results.append([y, step, packed, *cache.tensors, *packed_cache.tensors])
    for result in results[1:]:
        for got, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(got.cpu(), expected, rtol=1e-10, atol=1e-10)
