"""The forms against implementations that nobody here wrote: flash-linear-attention's naive files and transformers.

All oracles compute in float32. fla-core lies outside the import path (tests/oracles.txt says why), so that its naive
files are loaded one by one.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from operators import CASES, REGIMES, inputs, leaves, with_gradients
from torch.nn.functional import elu, softplus

from linattn_edu import decay, l2norm, mamba

FORMS = ["recurrent", "parallel", "chunkwise", "fused"]


def absent(how):
    """Skip where an oracle is not installed; on CI that is a failure."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(how)


def fla(op, function):
    """A function of fla/ops/<op>/naive.py, loaded without the package `fla` around it."""
    path = Path(sys.prefix) / "oracles/fla/ops" / op / "naive.py"
    if not path.exists():
        absent(f"no {path}: python -m pip install --no-deps --target {sys.prefix}/oracles -r tests/oracles.txt")
    spec = importlib.util.spec_from_file_location(f"fla_naive_{op}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)


def transformers(model, function):
    if importlib.util.find_spec("transformers") is None:
        absent("no transformers: python -m pip install transformers")
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), function)


def heads_first(oracle, *xs, **more):
    """Call an oracle that wants [B, H, T, ...], and turn its output back."""
    o, rest = oracle(*(x.transpose(1, 2) for x in xs), **more)
    return o.transpose(1, 2), rest


@dataclass(frozen=True)
class Oracle:
    """`call(q, k, v, *gates, S)`, or without S if it knows no initial state, returns o and the last state or None."""

    case: str
    call: Callable
    T: int = 100
    state: bool = True


def resumed(load, *order):
    """An oracle with the arguments `initial_state` and `output_final_state`; `order` says where it wants which gate."""

    def call(*xs):
        *tensors, S = xs
        moved = [tensors[i] for i in order] if order else tensors
        return load()(*moved, initial_state=S.clone(), output_final_state=True)

    return call


def normalised_linear(q, k, v, S, z):
    oracle = fla("linear_attn", "naive_recurrent_linear_attn")
    state = {"initial_state": (S, z[:, None]), "output_final_state": True}
    o, (S, z) = oracle(elu(q) + 1, elu(k) + 1, v, normalize=True, scale=1.0, **state)
    return o, (S, z[:, 0])


ORACLES = {
    "fla-linear": Oracle("linear-plain", resumed(lambda: fla("linear_attn", "naive_recurrent_linear_attn"))),
    "fla-linear-chunk": Oracle(
        "linear-plain", lambda *xs: (fla("linear_attn", "naive_chunk_linear_attn")(*xs), None), T=128, state=False
    ),
    "fla-linear-normalised": Oracle("linear", normalised_linear),
    "fla-simple-gla": Oracle("decay", resumed(lambda: fla("simple_gla", "naive_recurrent_simple_gla"))),
    "fla-simple-gla-chunk": Oracle("decay", resumed(lambda: fla("simple_gla", "naive_chunk_simple_gla"))),
    "fla-simple-gla-parallel": Oracle(
        "decay", lambda *xs: (fla("simple_gla", "naive_parallel_simple_gla")(*xs)[0], None), state=False
    ),
    "fla-gla": Oracle("gla", resumed(lambda: fla("gla", "naive_recurrent_gla"))),
    "fla-delta": Oracle(
        "deltanet",
        lambda *xs: heads_first(fla("delta_rule", "delta_rule_recurrence"), *xs[:-1], initial_state=xs[-1]),
    ),
    "fla-delta-chunk": Oracle(
        "deltanet", lambda *xs: heads_first(fla("delta_rule", "delta_rule_chunkwise"), *xs), T=128, state=False
    ),
    "fla-delta-parallel": Oracle(
        "deltanet",
        lambda *xs: (heads_first(fla("delta_rule", "delta_rule_parallel"), *xs)[0], None),
        T=128,
        state=False,
    ),
    "fla-gated-delta": Oracle(
        "gated_deltanet",
        resumed(lambda: fla("gated_delta_rule", "naive_recurrent_gated_delta_rule"), 0, 1, 2, 4, 3),
    ),
    "fla-gated-delta-chunk": Oracle(
        "gated_deltanet", resumed(lambda: fla("gated_delta_rule", "naive_chunk_gated_delta_rule"))
    ),
    "fla-kda": Oracle("kda", resumed(lambda: fla("kda", "naive_recurrent_kda"))),
    "fla-kda-chunk": Oracle("kda", resumed(lambda: fla("kda", "naive_chunk_kda")), T=128),
    "transformers-gated-delta": Oracle(
        "gated_deltanet", resumed(lambda: transformers("qwen3_next", "torch_recurrent_gated_delta_rule"))
    ),
    "transformers-gated-delta-chunk": Oracle(
        "gated_deltanet", resumed(lambda: transformers("qwen3_next", "torch_chunk_gated_delta_rule"))
    ),
    "transformers-kda": Oracle("kda", resumed(lambda: transformers("kimi_linear", "recurrent_kimi_delta_attention"))),
    "transformers-kda-chunk": Oracle("kda", resumed(lambda: transformers("kimi_linear", "chunk_kimi_delta_attention"))),
}
NAMES = [
    (name, regime)
    for name, oracle in ORACLES.items()
    for regime in (REGIMES if "g" in CASES[oracle.case].gates else ["zero"])
]

# Oracles that take a decay as the difference of running sums, or mask it only after `exp`, lose the gradient of g where
# the gate is strong: see test_where_an_oracle_loses_the_gradient_of_the_gate.
LOST = [(name, "strong") for name in ("fla-simple-gla-parallel", "fla-kda-chunk", "transformers-kda-chunk")]


def arguments(oracle, regime):
    """float32 inputs for the forms; with 4 value heads on 2 query heads, which the oracles get side by side."""
    a = inputs(oracle.case, regime, T=oracle.T, H=2, HV=4, K=16, V=24, dtype=torch.float32, state=oracle.state)
    return a | ({"eps": 1e-10} if oracle.case == "linear" else {})


def ask(oracle, a):
    q, k = (a[name].repeat_interleave(2, 2) for name in ("q", "k"))
    gates = [a[name] for name in CASES[oracle.case].gates]
    return oracle.call(q, k, a["v"], *gates, *leaves(a.get("initial_state")))


def relative_rms(got, expected):
    return ((got - expected).double().square().mean().sqrt() / expected.double().square().mean().sqrt()).item()


def assert_close(got, expected):
    assert got.shape == expected.shape and expected.isfinite().all()
    assert relative_rms(got, expected) < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name, regime", NAMES)
def test_every_form_is_the_oracle(name, regime, form):
    oracle = ORACLES[name]
    a = arguments(oracle, regime)
    o, S = getattr(CASES[oracle.case].module, form)(**a, output_final_state=True)
    expected, last = ask(oracle, a)
    assert_close(o, expected)
    for x, y in zip(leaves(S), leaves(last)):
        assert_close(x, y)


@pytest.mark.parametrize("name, regime", [pair for pair in NAMES if pair not in LOST])
def test_gradients_are_the_oracles(name, regime):
    """With the outputs alone and with the last state alone, where the oracle returns one (report 37)."""
    oracle = ORACLES[name]
    a = with_gradients(arguments(oracle, regime))
    names = [name for name in ("q", "k", "v", *CASES[oracle.case].gates) if name in a]
    xs = [*(a[name] for name in names), *leaves(a.get("initial_state"))]
    got, expected = CASES[oracle.case].module.chunkwise(**a, output_final_state=True), ask(oracle, a)
    for x, y in zip([got[0], *leaves(got[1])], [expected[0], *leaves(expected[1])]):
        weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        slopes = (torch.autograd.grad((z * weights).sum(), xs, allow_unused=True, retain_graph=True) for z in (x, y))
        for slope, of_oracle in zip(*slopes, strict=True):
            if of_oracle is None or not of_oracle.any():
                assert slope is None or not slope.any()
            else:
                assert_close(slope, of_oracle)


@pytest.mark.parametrize("name, regime", LOST)
def test_where_an_oracle_loses_the_gradient_of_the_gate(name, regime):
    """The worst loses it to NaN (report 4, transformers#48455). The judge is the recurrence in float64."""
    oracle = ORACLES[name]
    a, module = arguments(oracle, regime), CASES[oracle.case].module
    weights = torch.randn(a["v"].shape, generator=torch.Generator().manual_seed(1))

    def slope(function, dtype=torch.float32):
        named = with_gradients({key: x.to(dtype) for key, x in a.items()})
        return torch.autograd.grad((function(named)[0] * weights).sum(), named["g"])[0]

    exact = slope(lambda named: module.recurrent(**named), torch.float64)
    ours = relative_rms(slope(lambda named: module.chunkwise(**named)), exact)
    assert ours < 1e-6
    assert not relative_rms(slope(lambda named: ask(oracle, named)), exact) < 10 * ours


@pytest.mark.parametrize("form", [*FORMS, "convolution"])
def test_retnets_schedule_is_flas(form):
    """naive_retention draws no gate: it has the schedule of RetNet's eq. 8 inside."""
    a = inputs("decay", "zero", T=100, H=4, HV=4, K=16, V=24, dtype=torch.float32, state=False)
    o, _ = getattr(decay, form)(**a | {"g": decay.retnet_log_decay(4)})
    expected = fla("retention", "naive_retention")(*(a[name].transpose(1, 2) for name in ("q", "k", "v")))
    assert_close(o, expected.transpose(1, 2))


@pytest.mark.parametrize("model", ["qwen3_next", "kimi_linear"])
def test_l2norm_is_theirs(model):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    x[2] = 0
    torch.testing.assert_close(l2norm(x), transformers(model, "l2norm")(x), rtol=1e-6, atol=0)


def mamba_inputs(B=2, T=20, D=6, N=4):
    draw = torch.Generator().manual_seed(0)
    u, delta, A, B_, C, skip = (
        torch.randn(*shape, generator=draw) for shape in [(B, T, D), (B, T, D), (D, N), (B, T, N), (B, T, N), (D,)]
    )
    return {"u": u, "delta": softplus(delta), "A": -A.exp(), "B": B_, "C": C, "D": skip}


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise"])
def test_mamba_is_the_slow_path_of_transformers(form):
    a = with_gradients(mamba_inputs())
    y, h = getattr(mamba, form)(**a, output_final_state=True)
    u, delta, B, C = (a[name].transpose(1, 2) for name in ("u", "delta", "B", "C"))
    expected, last = transformers("mamba", "mamba_selective_scan")(
        u, delta, a["A"], B, C, a["D"], return_last_state=True
    )
    assert_close(y, expected.transpose(1, 2))
    assert_close(h, last)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    slopes = (torch.autograd.grad((x * weights).sum(), list(a.values())) for x in (y, expected.transpose(1, 2)))
    for slope, of_oracle in zip(*slopes, strict=True):
        assert_close(slope, of_oracle)


def test_a_step_of_mamba_is_that_of_transformers():
    a = mamba_inputs()
    tokens = {f"{name}_t": a[name][:, 0] for name in ("u", "delta", "B", "C")}
    h = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(2))
    y, new = mamba.step(**tokens, A=a["A"], D=a["D"], state=h)
    theirs = h.clone()
    expected = transformers("mamba", "mamba_selective_state_update")(
        theirs, *(tokens[f"{name}_t"] for name in ("u", "delta")), a["A"], tokens["B_t"], tokens["C_t"], a["D"]
    )
    assert_close(y, expected)
    assert_close(new, theirs)


@pytest.mark.parametrize("form", FORMS)
def test_mamba_2_in_transformers_is_a_scalar_decay(form):
    """q = C, k = B, v = Delta x, g = Delta A, scale 1; its state is [P, N], ours [N, P]; groups are grouped heads."""
    draw = torch.Generator().manual_seed(0)
    B, T, H, G, P, N = 2, 70, 4, 2, 6, 8
    x, S = torch.randn(B, T, H, P, generator=draw), torch.randn(B, H, P, N, generator=draw)
    k, q = torch.randn(2, B, T, G, N, generator=draw)
    delta, A = softplus(torch.randn(B, T, H, generator=draw)), -torch.rand(H, generator=draw)
    expected, last = transformers("mamba2", "mamba2_chunk_scan")(
        x, delta, A, k, q, chunk_size=16, initial_states=S, return_final_states=True
    )
    o, S = getattr(decay, form)(
        q, k, delta[..., None] * x, g=delta * A, scale=1.0, initial_state=S.mT, output_final_state=True
    )
    assert_close(o, expected)
    assert_close(S.mT, last)
