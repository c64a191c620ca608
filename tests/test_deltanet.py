"""DeltaNet: overwriting, reflections, products of Householder factors, and what they cost in accuracy."""

import numpy as np
import pytest
import torch
from operators import inputs
from torch.nn.functional import normalize

from linattn_edu import deltanet, linear
from linattn_edu.algebra import outer, read, solve_unit_lower

TIGHT = dict(rtol=0, atol=1e-12)
FORMS = [deltanet.recurrent, deltanet.parallel, deltanet.chunkwise, deltanet.fused]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit_keys(*shape, seed=0):
    return normalize(normal(*shape, seed=seed), dim=-1)


def write(S, k, v, beta):
    """The state after one token."""
    return deltanet.update(torch.zeros_like(k), k, v, torch.tensor(beta, dtype=k.dtype), S)[1]


def test_the_update_is_a_step_of_gradient_descent():
    S, k, v, beta = normal(5, 7).requires_grad_(), normal(5), normal(7), 0.3
    loss = (read(S, k) - v).square().sum() / 2
    (slope,) = torch.autograd.grad(loss, S)
    torch.testing.assert_close(write(S, k, v, beta), S - beta * slope, **TIGHT)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("length", [1.0, 0.5])
def test_the_transition_has_one_eigenvalue_that_is_not_1(beta, length):
    k = length * unit_keys(5)
    transition = write(torch.eye(5, dtype=torch.float64), k, torch.zeros(5, dtype=torch.float64), beta)
    torch.testing.assert_close(transition @ k, (1 - beta * length**2) * k, **TIGHT)
    expected = torch.tensor([1 - beta * length**2, 1, 1, 1, 1], dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.eigvalsh(transition), expected, **TIGHT)


def test_beta_1_overwrites_and_linear_attention_adds():
    k, v_1, v_2, S = unit_keys(5), normal(7, seed=1), normal(7, seed=2), normal(5, 7)
    torch.testing.assert_close(read(write(S, k, v_1, 1.0), k), v_1, **TIGHT)
    nothing = torch.zeros_like(S)
    for beta, expected in [(1.0, v_2), (0.5, v_1 / 4 + v_2 / 2), (2.0, 2 * v_2 - 2 * v_1)]:
        twice = write(write(nothing, k, v_1, beta), k, v_2, beta)
        torch.testing.assert_close(read(twice, k), expected, **TIGHT)
    added = linear.update(k, k, v_2, linear.update(k, k, v_1, nothing)[1])[0]
    torch.testing.assert_close(added, v_1 + v_2, **TIGHT)


def test_a_write_leaves_the_answers_of_orthogonal_keys():
    keys = torch.linalg.qr(normal(5, 5))[0]
    S = normal(5, 7)
    after = write(S, keys[0], normal(7, seed=1), 0.7)
    torch.testing.assert_close(keys[1:] @ after, keys[1:] @ S, **TIGHT)


@pytest.mark.parametrize("form", FORMS)
def test_orthonormal_keys_written_once_are_linear_attention(form):
    a = inputs("deltanet", B=1, T=16, H=3, HV=3, K=16, state=False) | {"output_final_state": True}
    a["k"] = torch.linalg.qr(normal(1, 3, 16, 16))[0].transpose(1, 2)
    a["beta"] = torch.ones(1, 16, 3, dtype=torch.float64)
    o, S = form(**a)
    del a["beta"]
    expected, S_linear = linear.recurrent(**a, feature_map="identity", normalize=False)
    torch.testing.assert_close(o, expected, **TIGHT)
    torch.testing.assert_close(S, S_linear, **TIGHT)


def test_other_keys_are_not_linear_attention():
    """Two keys at an angle: the second write differs by what it erases, k_2 (k_2^T k_1) v_1^T."""
    k, v = unit_keys(2, 5), normal(2, 7, seed=1)
    S = write(write(normal(5, 7) * 0, k[0], v[0], 1.0), k[1], v[1], 1.0)
    added = outer(k, v).sum(0)
    torch.testing.assert_close(added - S, (k[1] @ k[0]) * outer(k[1], v[0]), **TIGHT)
    assert (added - S).abs().max() > 0.1


@pytest.mark.parametrize("form", FORMS)
def test_parity_in_one_scalar_state(form):
    """beta = 2 flips the sign of a state, beta = 0 keeps it; so S_t is (-1) to the number of ones so far."""
    bits = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1, 1] * 20, dtype=torch.float64)
    one = torch.ones(1, 200, 1, 1, dtype=torch.float64)
    S_0 = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    o, _ = form(one, one, 0 * one, beta=2 * bits[None, :, None], initial_state=S_0)
    torch.testing.assert_close(o.flatten(), (-1) ** bits.cumsum(0), **TIGHT)


@pytest.mark.parametrize("form", FORMS)
def test_beta_up_to_1_never_flips_a_sign(form):
    """All factors 1 - beta_t are positive, whatever the bits do: such a state cannot tell even from odd."""
    beta = 0.3 * torch.rand(1, 70, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one = torch.ones(1, 70, 1, 1, dtype=torch.float64)
    o, _ = form(one, one, 0 * one, beta=beta, initial_state=one[:, :1])
    torch.testing.assert_close(o[..., 0], (1 - beta).cumprod(1), **TIGHT)
    assert (o > 0).all()


def test_beta_beyond_2_grows():
    one = torch.ones(1, 50, 1, 1, dtype=torch.float64)
    S_0 = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    for beta, expected in [(2.5, 1.5**50), (2.0, 1.0), (1.9, 0.9**50)]:
        o, _ = deltanet.recurrent(one, one, 0 * one, beta=beta * one[..., 0], initial_state=S_0)
        torch.testing.assert_close(o[0, -1].item(), expected)


def test_a_product_of_householder_factors_is_the_identity_minus_rank_C():
    """WY: (I - beta_C k_C k_C^T) ... (I - beta_1 k_1 k_1^T) = I - K^T W, and the writes add up to K^T U."""
    C, K, V = 12, 5, 7
    k, v, beta = unit_keys(C, K), normal(C, V, seed=1), 2 * torch.rand(C, dtype=torch.float64)
    identity = torch.eye(K, dtype=torch.float64)
    product, written = identity, torch.zeros(K, V, dtype=torch.float64)
    for k_i, v_i, beta_i in zip(k, v, beta):
        factor = identity - beta_i * outer(k_i, k_i)
        product, written = factor @ product, factor @ written + beta_i * outer(k_i, v_i)
    *_, W, U = deltanet.intra(k, k, v, beta)
    torch.testing.assert_close(identity - k.mT @ W, product, **TIGHT)
    torch.testing.assert_close(k.mT @ U, written, **TIGHT)


def test_rows_of_W_and_U_follow_the_recurrence_of_the_paper():
    """w_r = beta_r (k_r - sum_{i<r} (k_r^T k_i) w_i), and u_r with v: Yang et al. 2024, section 3."""
    k, v, beta = unit_keys(12, 5), normal(12, 7, seed=1), torch.rand(12, dtype=torch.float64)
    *_, W, U = deltanet.intra(k, k, v, beta)
    for r in range(12):
        for rows, x in ((W, k), (U, v)):
            expected = beta[r] * (x[r] - sum((k[r] @ k[i]) * rows[i] for i in range(r)))
            torch.testing.assert_close(rows[r], torch.as_tensor(expected), **TIGHT)


def test_the_sum_of_the_geometric_series_is_the_solution():
    """(I + A)^{-1} = I - A + A^2 - ... up to A^{C-1}; what A holds on or above its diagonal does not matter."""
    A, X = normal(9, 9), normal(9, 4, seed=1)
    (solution,) = solve_unit_lower(A, X)
    L = A.tril(-1).numpy()
    series = sum(np.linalg.matrix_power(-L, n) for n in range(9))
    torch.testing.assert_close(solution, torch.from_numpy(series @ X.numpy()), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(solution, solve_unit_lower(A.tril(-1), X)[0], rtol=0, atol=0)


def keys_alike(noise, *, C=64, K=64, dtype):
    """Keys that share a direction up to noise, and so read each other strongly."""
    return normalize(normal(K, seed=3) + noise * normal(C, K, seed=4), dim=-1).to(dtype)


def test_doubling_loses_every_digit_where_substitution_keeps_them():
    """Keys almost parallel, beta = 1: no entry of the inverse exceeds 1, yet the powers of A pass 1e17 on the way."""
    k = keys_alike(0.3, dtype=torch.float32)
    A = (k @ k.mT).tril(-1)
    identity = torch.eye(64)
    exact = torch.linalg.inv(A.double() + identity)
    (substituted,) = solve_unit_lower(A, identity)
    doubled, power = identity - A, A @ A
    for _ in range(5):
        doubled, power = doubled @ (identity + power), power @ power
    assert exact.abs().max() <= 1
    assert (substituted - exact).abs().max() < 1e-6
    assert (doubled - exact).abs().max() > 1e3


@pytest.mark.parametrize("beta, bound", [(1.0, 2e-6), (1.9, 3e-5), (2.0, 3e-5)])
def test_float32_is_accurate_for_keys_alike(beta, bound):
    for noise in (0.1, 0.3, 1.0):
        a = inputs("deltanet", B=1, T=256, H=1, HV=1, K=64, V=64)
        a["k"] = keys_alike(noise, C=256, dtype=torch.float64)[None, :, None]
        a["beta"] = torch.full_like(a["beta"], beta)
        exact, _ = deltanet.recurrent(**a)
        o, _ = deltanet.chunkwise(**{name: x.float() for name, x in a.items()})
        assert (o - exact).square().mean().sqrt() < bound * exact.square().mean().sqrt()


@pytest.mark.parametrize("form", FORMS)
def test_a_token_with_no_key_or_no_beta_writes_nothing(form):
    a = inputs("deltanet", T=70)
    silent = a | {"k": a["k"].clone(), "beta": a["beta"].clone()}
    silent["k"][:, 10:20] = 0
    silent["beta"][:, 40:50] = 0
    keep = [t for t in range(70) if not (10 <= t < 20 or 40 <= t < 50)]
    o, S = form(**silent, output_final_state=True)
    kept = {name: x if name == "initial_state" else x[:, keep] for name, x in silent.items()}
    expected, expected_S = form(**kept, output_final_state=True)
    torch.testing.assert_close(o[:, keep], expected, **TIGHT)
    torch.testing.assert_close(S, expected_S, **TIGHT)
