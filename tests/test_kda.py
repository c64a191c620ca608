"""KDA: what a gate for every channel adds to Gated DeltaNet, and why K / Gamma is never formed."""

import pytest
import torch
from operators import inputs
from torch.nn.functional import normalize, one_hot

from linattn_edu import gated_deltanet, gla, kda
from linattn_edu.algebra import outer, read

TIGHT = dict(rtol=0, atol=1e-12)
FORMS = ["recurrent", "parallel", "chunkwise", "fused"]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relative_rms(got, exact):
    return ((got.double() - exact).square().mean() / exact.square().mean()).sqrt().item()


def gradients(form, a):
    """The output, the final state, and the gradient of every argument for weights drawn for both."""
    a = {name: x.detach().clone().requires_grad_() for name, x in a.items()}
    o, S = form(**a, output_final_state=True)
    loss = sum((x * normal(*x.shape, seed=seed).to(x.dtype)).sum() for seed, x in enumerate((o, S)))
    return o, S, dict(zip(a, torch.autograd.grad(loss, list(a.values()))))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", ["strong", "weak", "zero"])
def test_equal_channels_are_gated_deltanet(form, regime):
    """Outputs, states and gradients; that of the shared gate is the sum of its channels' gradients."""
    scalar = inputs("gated_deltanet", regime, T=70)
    channel = scalar | {"g": scalar["g"][..., None].expand(-1, -1, -1, 5)}
    o, S, slopes = gradients(getattr(kda, form), channel)
    expected, expected_S, expected_slopes = gradients(getattr(gated_deltanet, form), scalar)
    torch.testing.assert_close(o, expected, **TIGHT)
    torch.testing.assert_close(S, expected_S, **TIGHT)
    slopes["g"] = slopes["g"].sum(-1)
    for name, slope in slopes.items():
        torch.testing.assert_close(slope, expected_slopes[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", ["strong", "weak"])
def test_basis_vectors_written_once_are_gla(form, regime):
    """Each write then meets a row of the state that is empty: nothing to erase."""
    a = inputs("kda", regime, B=1, T=16, H=1, HV=1, K=16, state=False) | {"output_final_state": True}
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    a["k"] = one_hot(order).double()[None, :, None]
    a["beta"] = torch.ones_like(a["beta"])
    o, S = getattr(kda, form)(**a)
    del a["beta"]
    expected, expected_S = gla.recurrent(**a)
    torch.testing.assert_close(o, expected, **TIGHT)
    torch.testing.assert_close(S, expected_S, **TIGHT)


@pytest.mark.parametrize("form", FORMS)
def test_a_channel_with_no_decay_outlives_one_that_resets(form):
    a = inputs("kda", "zero", T=70) | {"output_final_state": True}
    a["beta"] = torch.zeros_like(a["beta"])
    a["g"] = a["g"].clone()
    a["g"][..., 1] = -100
    S = getattr(kda, form)(**a)[1]
    keep = [0, 2, 3, 4]
    torch.testing.assert_close(S[:, :, keep], a["initial_state"][:, :, keep], **TIGHT)
    assert S[:, :, 1].abs().max() < 1e-300


def test_decay_and_erasing_do_not_commute():
    k, g, beta = normalize(normal(5), dim=-1), -normal(5, seed=2).abs(), torch.tensor(0.8, dtype=torch.float64)
    erase, D = torch.eye(5, dtype=torch.float64) - beta * outer(k, k), g.exp().diag()
    transition = kda.update(k, k, 0 * k, g, beta, torch.eye(5, dtype=torch.float64))[1]
    torch.testing.assert_close(transition, erase @ D, **TIGHT)
    assert (D @ erase - erase @ D).abs().max() > 0.05


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", ["strong", "weak"])
def test_every_form_decays_before_it_erases(form, regime):
    a = inputs("kda", regime, T=70, H=4)
    S, rows = a["initial_state"], []
    for t in range(70):
        q, k, v, g, beta = (a[name][:, t] for name in ("q", "k", "v", "g", "beta"))
        S = g.exp()[..., None] * (S - outer(beta[..., None] * k, read(S, k))) + outer(beta[..., None] * k, v)
        rows.append(5**-0.5 * read(S, q))
    o, _ = getattr(kda, form)(**a)
    assert relative_rms(torch.stack(rows, 1), o) > 1e-3


def dplr(a, write):
    """S_t = (Diag(alpha_t) - a_t b_t^T) S_{t-1} + write, a = beta k, b = k * alpha: Kimi Linear, section 6.2."""
    S, rows = a["initial_state"], []
    for t in range(a["q"].shape[1]):
        q, k, v, g, beta = (a[name][:, t] for name in ("q", "k", "v", "g", "beta"))
        beta, alpha = beta[..., None], g.exp()
        S = (torch.diag_embed(alpha) - outer(beta * k, k * alpha)) @ S + write(beta, k, v)
        rows.append(q.shape[-1] ** -0.5 * read(S, q))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("regime", ["strong", "weak", "zero"])
def test_it_is_diagonal_plus_low_rank_and_its_write_keeps_beta(regime):
    """Section 6.2 of the paper prints the DPLR write as k v^T; equal to KDA it is with beta k v^T."""
    a = inputs("kda", regime, H=4)
    o, _ = kda.recurrent(**a)
    torch.testing.assert_close(dplr(a, lambda beta, k, v: outer(beta * k, v)), o, **TIGHT)
    assert relative_rms(dplr(a, lambda beta, k, v: outer(k, v)), o) > 0.05


def unrolled(a, factor):
    """o_t = sum_i (prod_{j=t..i+1} factor_j) beta_i k_i v_i^T read with q_t, for one head and no initial state."""
    q, k, v, g, beta = (a[name][0, :, 0] for name in ("q", "k", "v", "g", "beta"))
    erase = torch.eye(k.shape[-1], dtype=k.dtype) - beta[:, None, None] * outer(k, k)
    transitions = [factor(erase[t], g[t].exp().diag()) for t in range(len(q))]
    rows = []
    for t in range(len(q)):
        S = 0
        for i in range(t + 1):
            write = beta[i] * outer(k[i], v[i])
            for j in range(i + 1, t + 1):
                write = transitions[j] @ write
            S = S + write
        rows.append(q.shape[-1] ** -0.5 * read(S, q[t]))
    return torch.stack(rows)


@pytest.mark.parametrize("regime", ["strong", "weak"])
def test_erratum_of_kimi_linear_the_order_in_its_eq_12(regime):
    """Eq. 1 erases after the decay, (I - beta k k^T) Diag(alpha); eq. 12, unrolled, prints it the other way."""
    a = inputs("kda", regime, B=1, T=12, H=1, HV=1, state=False)
    exact = kda.recurrent(**a)[0][0, :, 0]
    torch.testing.assert_close(unrolled(a, lambda erase, D: erase @ D), exact, **TIGHT)
    assert relative_rms(unrolled(a, lambda erase, D: D @ erase), exact) > 1e-3


def scores_by_factors(q, k, G):
    """The paper's (Gamma * Q) (K / Gamma)^T, masked afterwards."""
    return ((G.exp() * q) @ (k / G.exp()).mT).tril()


def test_dividing_by_gamma_overflows_and_the_forms_do_not():
    """In float32 exp overflows at 88.7: a block of 64 tokens with g = -2 has K / Gamma up to e^128."""
    a = with_gate(-2.0)
    q, k, g = (a[name][0, :64, 0] for name in ("q", "k", "g"))
    assert scores_by_factors(q, k, 0.1 * g.cumsum(0)).isfinite().all()
    assert not scores_by_factors(q, k, g.cumsum(0)).isfinite().all()
    o, S, slopes = gradients(kda.chunkwise, a)
    assert all(x.isfinite().all() for x in (o, S, *slopes.values()))


def with_gate(gate):
    """float32 arguments whose gate is a constant, resets among weak gates, or drawn from 0 to -40 for every channel."""
    a = inputs("kda", B=1, T=256, H=2, HV=2, K=64, V=64, dtype=torch.float32)
    if isinstance(gate, float):
        return a | {"g": torch.full_like(a["g"], gate)}
    chance = torch.rand(a["g"].shape, generator=torch.Generator().manual_seed(0))
    reset = -40 * chance if gate == "channels" else float(gate.removeprefix("reset"))
    return a | {"g": torch.where((chance < 0.1) | (gate == "channels"), reset, -0.01)}


@pytest.mark.parametrize("form", ["parallel", "chunkwise"])
@pytest.mark.parametrize("gate", [-0.01, -0.3, -1.3, -2.0, -5.0, -7.3, -12.0, -20.0, "reset-60", "reset-1e4", "channels"])
def test_float32_is_as_good_as_the_recurrence_for_gates_of_any_strength(gate, form):
    """Outputs, states and every gradient, that of g among them, which at g = -20 is a billionth of the others."""
    a = with_gate(gate)
    double = {name: x.double() for name, x in a.items()}
    *got, slopes = gradients(getattr(kda, form), a)
    *exact, exact_slopes = gradients(kda.recurrent, double)
    for x, y in zip([*got, *slopes.values()], [*exact, *exact_slopes.values()], strict=True):
        assert relative_rms(x, y) < 1e-6
