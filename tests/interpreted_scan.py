"""Mamba's selective scan in Triton's interpreter, in a process of its own: tests/test_scan_kernel.py runs this file."""

from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad

from linattn_edu import mamba
from linattn_edu.kernels import mode, scan

FORMS = ["euler", "zoh"]


def test_the_interpreter_runs():
    assert mode() == "interpret"


def inputs(B=2, T=20, D=3, N=3, step=1.0, seed=0):
    """float64; `step` is the size of the largest Delta: with A down to -2 the decay of a token reaches exp(-2 step)."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(*shape, generator=draw, dtype=torch.float64)

    return {
        "u": normal(B, T, D), "delta": step * uniform(B, T, D), "A": -2 * uniform(D, N), "B": normal(B, T, N),
        "C": normal(B, T, N), "D": normal(D), "initial_state": normal(B, D, N),
    }  # fmt: skip


def results(f, a, outputs=(0, 1), **options):
    """y, the last state, and the gradient of every input for a random weight of the chosen outputs."""
    a = {name: x.detach().clone().requires_grad_() for name, x in a.items()}
    found = f(**a, output_final_state=True, **options)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in found]
    chosen, weights = [found[i] for i in outputs], [weights[i] for i in outputs]
    return [*found, *torch.autograd.grad(chosen, list(a.values()), weights, materialize_grads=True)]


def assert_kernel_is_recurrent(a, tolerance=3e-6, outputs=(0, 1), **options):
    expected = results(mamba.recurrent, a, outputs, **options)
    got = results(mamba.fused, {name: x.float() for name, x in a.items()}, outputs, backend="triton", **options)
    for x, y in zip(got, expected, strict=True):
        assert x.shape == y.shape and x.dtype == torch.float32
        assert (x - y).abs().max() <= tolerance * max(y.abs().max().item(), 1e-3)


@pytest.mark.parametrize("discretization", FORMS)
@pytest.mark.parametrize("step", [0.01, 1.0, 100.0])
def test_the_kernel_is_the_recurrence(discretization, step):
    assert_kernel_is_recurrent(inputs(step=step), discretization=discretization)


@pytest.mark.parametrize("T", [1, 16, 33])
def test_lengths(T):
    assert_kernel_is_recurrent(inputs(B=1, T=T, D=2, N=2))


@pytest.mark.parametrize("D, N", [(18, 16), (3, 1), (3, 70)])
def test_several_blocks_of_channels_and_odd_widths(D, N):
    assert_kernel_is_recurrent(inputs(B=1, T=3, D=D, N=N))


def test_groups_of_channels_that_follow_one_another_in_a_program():
    """5 blocks of 2 channels of 16 states in two sequences, on one multiprocessor: programs of 3 groups and of 2."""
    with mock.patch.object(scan, "multiprocessors", lambda device: 1):
        assert scan.prepared_backward(torch.device("cpu"), 2, 18, 10, 16, False)[1] == 2
    assert_kernel_is_recurrent(inputs(B=2, T=18, D=10, N=16))


@pytest.mark.parametrize("without", ["D", "initial_state"])
def test_what_may_be_left_out(without):
    a = inputs(T=18)
    del a[without]
    assert_kernel_is_recurrent(a)


@pytest.mark.parametrize("outputs", [(0,), (1,)])
def test_one_output_alone_has_a_gradient(outputs):
    assert_kernel_is_recurrent(inputs(B=1, T=18, D=2, N=2), outputs=outputs)


@pytest.mark.parametrize("discretization", FORMS)
def test_steps_that_do_nothing_and_decays_that_do_not(discretization):
    a = inputs(B=1, T=18, D=4, N=2)
    a["delta"][:, 3:9] = 0.0
    a["A"][:2] = torch.tensor([[0.0, 0.3], [-1e-4, -60.0]])
    assert_kernel_is_recurrent(a, discretization=discretization)


def test_two_runs_give_the_same_bits():
    a = {name: x.float() for name, x in inputs(B=1, T=2, D=18, N=16).items()}
    first, second = (results(mamba.fused, a) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_and_strides(dtype):
    a = {name: x.to(dtype) if name in "uBC" else x.float() for name, x in inputs(T=18).items()}
    a["u"] = a["u"].repeat_interleave(2, -1)[..., ::2]
    a["initial_state"] = a["initial_state"].mT.contiguous().mT
    y, h = mamba.fused(**a, output_final_state=True, backend="triton")
    exact, last = mamba.recurrent(**a, output_final_state=True)
    assert y.dtype == dtype and h.dtype == torch.float32
    torch.testing.assert_close(y, exact)
    torch.testing.assert_close(h, last)


@pytest.mark.parametrize("without", [[], ["D", "initial_state"]])
def test_torch_compile_takes_the_scan_whole(without):
    a = {name: x.float() for name, x in inputs(B=1, T=17, D=2, N=2).items() if name not in without}

    def fused(**a):
        return mamba.fused(**a, backend="triton")

    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    for x, y in zip(results(compiled, a), results(fused, a), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("discretization", FORMS)
@pytest.mark.parametrize("inplace", [False, True])
def test_steps_are_recurrent(discretization, inplace):
    a = inputs(T=3)
    y, last = mamba.recurrent(**a, output_final_state=True, discretization=discretization)
    low = {name: x.float() for name, x in a.items()}
    state = given = low.pop("initial_state")
    for t in range(3):
        token = {name if name in ("A", "D") else f"{name}_t": x if name in ("A", "D") else x[:, t] for name, x in low.items()}
        y_t, state = mamba.step(**token, state=state, discretization=discretization, inplace=inplace, backend="triton")
        assert (y_t - y[:, t]).abs().max() <= 2e-6 * y.abs().max()
    assert (state - last).abs().max() <= 2e-6 * last.abs().max() and (state is given) == inplace
    swapped = given.mT.contiguous().mT
    expected = mamba.step(**token, state=given.clone(), backend="torch")
    got = mamba.step(**token, state=swapped, inplace=True)
    assert got[1] is swapped and torch.allclose(got[0], expected[0]) and torch.allclose(swapped, expected[1])


def test_a_wanted_gradient_keeps_its_graph():
    a = {name: x.float() for name, x in inputs(T=1).items()}
    token = {f"{name}_t": a[name][:, 0] for name in ("u", "delta", "B", "C")} | {"A": a["A"].requires_grad_()}
    assert mamba.step(**token, state=a["initial_state"])[0].requires_grad
    with pytest.raises(ValueError, match="`backend`: got 'triton', but a gradient is wanted"):
        mamba.step(**token, state=a["initial_state"], backend="triton")


def test_float64_and_widths_beyond_the_kernel_are_refused_with_advice():
    with pytest.raises(ValueError, match="`backend`: got 'triton', but float64 is computed in PyTorch"):
        mamba.fused(**inputs(), backend="triton")
    wide = {name: x.float() for name, x in inputs(B=1, T=2, D=1, N=257).items()}
    with pytest.raises(ValueError, match="the kernel serves N <= 256 states a channel, got N = 257"):
        mamba.fused(**wide, backend="triton")
    assert torch.equal(mamba.fused(**wide)[0], mamba.chunkwise(**wide)[0])


def test_a_second_derivative_is_refused_and_not_dropped():
    a = {name: x.float().requires_grad_() for name, x in inputs(B=1, T=5).items()}
    y, _ = mamba.fused(**a)
    with pytest.raises(RuntimeError, match="gradients have no graph .* backend='torch'"):
        torch.autograd.grad(y.square().sum(), a["u"], create_graph=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own, in forward mode
def test_forward_derivatives_are_those_of_the_formulas():
    a = {name: x.float() for name, x in inputs(B=1, T=5).items()}
    with forward_ad.dual_level():
        a["u"] = forward_ad.make_dual(a["u"], torch.ones_like(a["u"]))
        found, expected = (forward_ad.unpack_dual(f(**a)[0]).tangent for f in (mamba.fused, mamba.chunkwise))
        assert expected.norm() > 0 and torch.equal(found, expected)
