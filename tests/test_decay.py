"""What is particular to the scalar decay: RetNet's schedule, the convolution, the prefix scan, strong gates."""

import functools
import math

import pytest
import torch
from operators import inputs, with_gradients

from linattn_edu import decay, linear
from linattn_edu.algebra import decay_matrix, scan

TIGHT = dict(rtol=1e-10, atol=1e-10)


def relative_rms(x, y):
    return ((x.double() - y).square().mean().sqrt() / y.square().mean().sqrt()).item()


def constant(H, low=-0.3, seed=3):
    draw = torch.Generator().manual_seed(seed)
    return low * torch.rand(H, generator=draw, dtype=torch.float64)


def test_decay_matrix_is_the_product_of_the_gates_between():
    g = -torch.rand(2, 9, dtype=torch.float64)
    D = decay_matrix(g)
    for i in range(9):
        for j in range(9):
            expected = g[:, j + 1 : i + 1].sum(-1).exp() if j <= i else torch.zeros(2, dtype=torch.float64)
            torch.testing.assert_close(D[:, i, j], expected, **TIGHT)


def test_zero_gate_is_unnormalised_linear_attention():
    """Report 5 (flash-linear-attention#104, #463): a gate of 1 has to be no gate."""
    arguments = inputs("decay", "zero", T=70)
    plain = {key: x for key, x in arguments.items() if key != "g"} | {"feature_map": "identity", "normalize": False}
    for form in ("recurrent", "parallel", "chunkwise"):
        o, S = getattr(decay, form)(**arguments, output_final_state=True)
        expected, last = linear.recurrent(**plain, output_final_state=True)
        torch.testing.assert_close(o, expected, **TIGHT)
        torch.testing.assert_close(S, last, **TIGHT)


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise"])
def test_constant_gate_is_the_same_gate_at_every_token(form):
    arguments, g = inputs("decay"), constant(4)
    spread = g.expand(2, 37, 4)
    o, S = getattr(decay, form)(**arguments | {"g": g}, output_final_state=True)
    expected, last = decay.recurrent(**arguments | {"g": spread}, output_final_state=True)
    torch.testing.assert_close(o, expected, **TIGHT)
    torch.testing.assert_close(S, last, **TIGHT)
    at_t = {f"{key}_t": arguments[key][:, 0] for key in "qkv"} | {"state": arguments["initial_state"]}
    torch.testing.assert_close(decay.step(**at_t, g=g)[0], expected[:, 0], **TIGHT)


def test_constant_gate_collects_its_gradient_over_all_tokens():
    arguments = inputs("decay", state=False)
    spread = constant(4).expand(2, 37, 4).clone().requires_grad_()
    decay.recurrent(**arguments | {"g": spread})[0].square().sum().backward()
    for form in ("recurrent", "parallel", "chunkwise", "convolution"):
        g = constant(4).requires_grad_()
        getattr(decay, form)(**arguments | {"g": g})[0].square().sum().backward()
        torch.testing.assert_close(g.grad, spread.grad.sum((0, 1)), rtol=1e-10, atol=1e-9)


def test_retnet_schedule_is_one_minus_a_power_of_two():
    g = decay.retnet_log_decay(8, dtype=torch.float64)
    torch.testing.assert_close(g.exp(), 1 - 2.0 ** (-5 - torch.arange(8, dtype=torch.float64)), **TIGHT)
    half_life = math.log(0.5) / g
    assert [round(half_life[h].item(), 1) for h in (0, 4, 7)] == [21.8, 354.5, 2838.8]
    assert decay.retnet_log_decay(3).dtype == torch.float32
    assert decay.retnet_log_decay(40)[-1] < 0  # 1 - 2^-44 rounds to 1 in float32, its logarithm does not vanish
    with pytest.raises(ValueError, match="`H`: got 0, expected a whole number of at least 1"):
        decay.retnet_log_decay(0)


def test_recurrence_is_retnets_parallel_form_written_out():
    """Sun et al. 2023, eq. 5: (Q K^T * D) V with D_nm = gamma^(n-m)."""
    arguments = inputs("decay", H=4, state=False)
    gamma = 1 - 2.0 ** (-5 - torch.arange(4, dtype=torch.float64))
    n = torch.arange(37, dtype=torch.float64)
    D = (gamma[:, None, None] ** (n[:, None] - n)).tril()
    scores = torch.einsum("bnhk,bmhk->bhnm", arguments["q"], arguments["k"]) * D
    expected = torch.einsum("bhnm,bmhv->bnhv", scores, arguments["v"])
    g = decay.retnet_log_decay(4, dtype=torch.float64)
    torch.testing.assert_close(decay.recurrent(**arguments | {"g": g}, scale=1.0)[0], expected, **TIGHT)


def test_recurrence_is_mamba2_with_the_step_size_in_gate_and_write():
    """Dao and Gu 2024: h_t = exp(Delta_t A) h_{t-1} + Delta_t x_t B_t^T, y_t = h_t C_t, with h [P, N] = S^T."""
    arguments = inputs("decay", state=False, B=1, H=1, HV=2)
    C, B, x = arguments["q"][0, :, 0], arguments["k"][0, :, 0], arguments["v"][0]
    delta, A = torch.rand(37, 2, dtype=torch.float64), -torch.tensor([0.7, 3.0], dtype=torch.float64)
    h, rows = torch.zeros(2, 7, 5, dtype=torch.float64), []
    for t in range(37):
        h = (delta[t] * A).exp()[:, None, None] * h + torch.einsum("h,hp,n->hpn", delta[t], x[t], B[t])
        rows.append(h @ C[t])
    o, S = decay.chunkwise(
        **arguments | {"v": (delta[..., None] * x)[None], "g": (delta * A)[None]}, scale=1.0, output_final_state=True
    )
    torch.testing.assert_close(o[0], torch.stack(rows), **TIGHT)
    torch.testing.assert_close(S[0], h.mT, **TIGHT)


@pytest.mark.parametrize("T", [0, 1, 2, 37, 64])
def test_convolution_is_recurrent_for_a_constant_gate(T):
    arguments = inputs("decay", state=False, T=T) | {"g": constant(4, low=-5.0)}
    named = with_gradients(arguments)
    o, state = decay.convolution(**named)
    assert state is None
    torch.testing.assert_close(o, decay.recurrent(**arguments)[0], **TIGHT)
    expected = with_gradients(arguments)
    draw = torch.randn(o.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    got = torch.autograd.grad((o * draw).sum(), list(named.values()))
    wanted = torch.autograd.grad((decay.recurrent(**expected)[0] * draw).sum(), list(expected.values()))
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, **TIGHT)


def test_convolution_takes_scale_and_dtype_like_the_forms():
    arguments = inputs("decay", state=False) | {"g": constant(4)}
    o = decay.convolution(**arguments, scale=2.0)[0]
    torch.testing.assert_close(o, decay.recurrent(**arguments, scale=2.0)[0], **TIGHT)
    low = arguments | {key: arguments[key].bfloat16() for key in "qkv"}
    assert decay.convolution(**low)[0].dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = decay.convolution(**{key: y.float() for key, y in arguments.items()})[0]
    assert torch.equal(x, decay.convolution(**{key: y.float() for key, y in arguments.items()})[0])


def test_convolution_refuses_a_gate_that_depends_on_the_token():
    arguments = inputs("decay", state=False)
    with pytest.raises(ValueError, match=r"`g`: got shape \[2, 37, 4\], expected \[HV\]: only a constant decay"):
        decay.convolution(**arguments)
    with pytest.raises(ValueError, match=r"`g`: got shape \[3\], expected \[HV\] with HV = 4"):
        decay.convolution(**arguments | {"g": constant(3)})
    with pytest.raises(TypeError, match="got no argument `g`"):
        decay.convolution(*(arguments[key] for key in "qkv"))
    with pytest.raises(TypeError, match="`g`: got float 0.5"):
        decay.convolution(**arguments | {"g": 0.5})
    with pytest.raises(TypeError, match=r"`g`: got nothing \(None\), expected a tensor \[HV\]"):
        decay.convolution(**arguments | {"g": None})


@pytest.mark.parametrize("T", [0, 1, 2, 3, 7, 8, 37, 64])
def test_prefix_states_are_the_states_of_recurrent(T):
    arguments = inputs("decay", state=False, T=T)
    k, v, g = arguments["k"], arguments["v"], arguments["g"]
    for gate in (None, constant(4), g):
        S = decay.prefix_states(k, v, g=gate)
        assert S.shape == (2, T, 4, 5, 7) and S.dtype == torch.float64
        for t in range(T):
            named = {key: arguments[key][:, : t + 1] for key in "qkv"}
            at_t = gate[:, : t + 1] if gate is g else torch.zeros(4).double() if gate is None else gate
            last = decay.recurrent(**named, g=at_t, output_final_state=True)[1]
            torch.testing.assert_close(S[:, t], last, **TIGHT)
    if T:
        torch.testing.assert_close(
            decay.prefix_states(k, v), torch.einsum("bthk,bthv->bthkv", k.repeat_interleave(2, 2), v).cumsum(1), **TIGHT
        )


def test_prefix_states_name_bad_arguments():
    k, v, g = (inputs("decay", state=False)[key] for key in ("k", "v", "g"))
    with pytest.raises(ValueError, match=r"`v`: got shape \[2, 4, 37, 7\], expected \[B, T, HV, V\]"):
        decay.prefix_states(k, v.transpose(1, 2))
    with pytest.raises(ValueError, match="`v`: got HV = 3 heads, expected a multiple of H = 2"):
        decay.prefix_states(k, v[:, :, :3])
    with pytest.raises(ValueError, match=r"`g`: got shape \[2, 37, 3\], expected \[B, T, HV\]"):
        decay.prefix_states(k, v, g=g[..., :3])
    with pytest.raises(TypeError, match="`g`: got float 0.5, expected a tensor"):
        decay.prefix_states(k, v, g=0.5)


@pytest.mark.parametrize("T", [1, 2, 3, 6, 13, 64])
def test_scan_is_the_loop(T):
    a, x = torch.randn(2, 3, T, 4, dtype=torch.float64).requires_grad_()
    h, rows = torch.zeros(3, 4, dtype=torch.float64), []
    for t in range(T):
        h = a[:, t] * h + x[:, t]
        rows.append(h)
    expected, got = torch.stack(rows, 1), scan(a, x)
    torch.testing.assert_close(got, expected, **TIGHT)
    draw = torch.randn_like(got)
    torch.testing.assert_close(
        *(torch.autograd.grad((y * draw).sum(), [a, x], materialize_grads=True) for y in (got, expected)), **TIGHT
    )


def test_scan_has_logarithmic_depth():
    def depth(f, T):
        @functools.cache
        def longest(node):
            return 1 + max((longest(before) for before, _ in node.next_functions if before is not None), default=0)

        a, x = torch.rand(2, 1, T, 1).requires_grad_()
        return longest(f(a, x).grad_fn)

    assert depth(scan, 256) - depth(scan, 128) == depth(scan, 64) - depth(scan, 32) < 16


@pytest.mark.parametrize("gate", [-50.0, -100.0, -1000.0, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_very_strong_gates_are_finite_forward_and_backward(gate, dtype):
    """Reports 2 and 3 (flash-linear-attention#99, #111, #122): exp of the masked upper triangle, very small decay."""
    arguments = inputs("decay", T=128, dtype=dtype)
    arguments["g"] = torch.full_like(arguments["g"], gate)
    kv_only = arguments["v"] * (arguments["q"] * arguments["k"]).sum(-1, keepdim=True).repeat_interleave(2, 2)
    for form in ("recurrent", "parallel", "chunkwise"):
        named = with_gradients(arguments)
        o, S = getattr(decay, form)(**named, output_final_state=True)
        torch.testing.assert_close(o, kv_only * 5**-0.5, rtol=1e-5, atol=1e-5)  # nothing but the token itself is left
        for x in torch.autograd.grad(o.sum() + S.sum(), list(named.values())):
            assert x.isfinite().all()


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise"])
@pytest.mark.parametrize("gate", [-0.01, -0.1, -1.0, -5.0, -20.0, "reset"])
def test_float32_stays_near_the_float64_recurrence(gate, form):
    arguments = inputs("decay", T=256, K=64, V=64)
    arguments["g"] = gates_of(arguments["g"].shape, gate)
    expected, last = decay.recurrent(**arguments, output_final_state=True)
    rounded = {key: x.float() for key, x in arguments.items()}
    o, S = getattr(decay, form)(**rounded, output_final_state=True)
    bound = 1e-4 if gate == "reset" else 1e-5
    assert relative_rms(o, expected) < bound
    assert relative_rms(S, last) < bound


def gates_of(shape, gate):
    """A constant, or one token in ten that forgets everything among tokens that forget almost nothing."""
    if gate != "reset":
        return torch.full(shape, gate, dtype=torch.float64)
    reset = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.1
    return torch.where(reset, -60.0, -0.01).double()
