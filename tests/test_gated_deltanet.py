"""Gated DeltaNet: what the scalar gate adds to DeltaNet, the order of its two steps, and its accuracy in float32."""

import pytest
import torch
from operators import inputs
from torch.nn.functional import normalize

from linattn_edu import decay, deltanet, gated_deltanet
from linattn_edu.algebra import outer, read, solve_unit_lower

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
def test_without_decay_it_is_deltanet_to_the_bit(form):
    a = inputs("gated_deltanet", "zero", T=70, dtype=torch.float32) | {"output_final_state": True}
    gated = getattr(gated_deltanet, form)(**a)
    del a["g"]
    for x, y in zip(gated, getattr(deltanet, form)(**a)):
        assert torch.equal(x, y)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", ["strong", "weak"])
def test_without_writes_the_state_only_decays(form, regime):
    a = inputs("gated_deltanet", regime, T=70) | {"output_final_state": True}
    a["beta"] = torch.zeros_like(a["beta"])
    o, S = getattr(gated_deltanet, form)(**a)
    torch.testing.assert_close(S, a["g"].sum(1).exp()[..., None, None] * a["initial_state"], **TIGHT)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", ["strong", "weak"])
def test_orthonormal_keys_written_once_are_decaying_linear_attention(form, regime):
    a = inputs("gated_deltanet", regime, B=1, T=16, H=3, HV=3, K=16, state=False) | {"output_final_state": True}
    a["k"] = torch.linalg.qr(normal(1, 3, 16, 16))[0].transpose(1, 2)
    a["beta"] = torch.ones_like(a["beta"])
    o, S = getattr(gated_deltanet, form)(**a)
    del a["beta"]
    expected, expected_S = decay.recurrent(**a)
    torch.testing.assert_close(o, expected, **TIGHT)
    torch.testing.assert_close(S, expected_S, **TIGHT)


def one_token(seed=0):
    k, v = normalize(normal(5, seed=seed), dim=-1), normal(7, seed=seed + 1)
    return k, v, torch.tensor(-0.7, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64), normal(5, 7)


def test_beta_1_overwrites_whatever_the_gate():
    k, v, g, beta, S = one_token()
    after = gated_deltanet.update(k, k, v, g, beta, S)[1]
    torch.testing.assert_close(read(after, k), v, **TIGHT)


def test_an_error_taken_before_the_decay_erases_too_much():
    """Delta read on S_{t-1} in place of alpha S_{t-1}: with beta = 1 the key then answers v - (1 - alpha) S^T k."""
    k, v, g, beta, S = one_token()
    swapped = g.exp() * S + beta * outer(k, v - read(S, k))
    torch.testing.assert_close(read(swapped, k), v - (1 - g.exp()) * read(S, k), **TIGHT)
    assert (read(swapped, k) - v).abs().max() > 0.1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", ["strong", "weak"])
def test_every_form_decays_before_it_reads(form, regime):
    """The swapped order as a recurrence of its own: no form agrees with it, not even for weak gates."""
    a = inputs("gated_deltanet", regime, T=70, H=4)
    S, rows = a["initial_state"], []
    for t in range(70):
        q, k, v, g, beta = (a[name][:, t] for name in ("q", "k", "v", "g", "beta"))
        S = g.exp()[..., None, None] * S + outer(k, beta[..., None] * (v - read(S, k)))
        rows.append(5**-0.5 * read(S, q))
    o, _ = getattr(gated_deltanet, form)(**a)
    assert relative_rms(torch.stack(rows, 1), o) > 1e-3


@pytest.mark.parametrize("regime", ["strong", "weak", "zero"])
def test_W_in_two_right_ways_and_a_wrong_one(regime):
    """T_gated Diag(gamma) K = Diag(gamma) T K, T free of the gate; T_gated K does not know how far S has decayed."""
    a = inputs("gated_deltanet", regime, B=1, T=32, H=1, HV=1)
    k, v, g, beta = (a[name][0, :, 0] for name in ("k", "v", "g", "beta"))
    G, k_beta = g.cumsum(0), beta[:, None] * k
    gamma, D = G.exp()[:, None], (G[:, None] - G).tril().exp()
    (W,) = solve_unit_lower(k_beta @ k.mT * D, gamma * k_beta)
    (ungated,) = solve_unit_lower(k_beta @ k.mT, k_beta)
    torch.testing.assert_close(W, gamma * ungated, **TIGHT)
    torch.testing.assert_close(W, gated_deltanet.intra(k, k, v, g, beta)[3], **TIGHT)
    (wrong,) = solve_unit_lower(k_beta @ k.mT * D, k_beta)
    assert (relative_rms(wrong, W) > 0.05) == (regime != "zero")


def block():
    """One block of tokens with gates that matter within it, and its output by the recurrence."""
    a = inputs("gated_deltanet", "weak", B=1, T=32, H=1, HV=1)
    a["g"] = 20 * a["g"]
    return a, gated_deltanet.recurrent(**a)[0][0, :, 0]


def block_by_hand(a, D, sign=1):
    """The output of one block by the paper's chunkwise form, with a given decay matrix and T = (I + sign A)^{-1}."""
    q, k, v, g, beta = (a[name][0, :, 0] for name in ("q", "k", "v", "g", "beta"))
    gamma, A = g.cumsum(0).exp()[:, None], (beta[:, None] * (k @ k.mT) * D).tril(-1)
    T = torch.linalg.inv(torch.eye(len(g), dtype=g.dtype) + sign * A) * beta
    V = T @ v - T @ (gamma * k) @ a["initial_state"][0, 0]
    return q.shape[-1] ** -0.5 * (gamma * q @ a["initial_state"][0, 0] + (q @ k.mT * D).tril() @ V)


def test_erratum_of_gated_deltanet_v1_sign_and_ratio():
    """The first version prints (I - tril(A))^{-1} and gamma_j / gamma_i; v2 has the plus and gamma_i / gamma_j."""
    a, exact = block()
    gamma = a["g"][0, :, 0].cumsum(0).exp()[:, None]
    torch.testing.assert_close(block_by_hand(a, gamma / gamma.mT), exact, rtol=1e-10, atol=1e-10)
    assert relative_rms(block_by_hand(a, gamma / gamma.mT, sign=-1), exact) > 0.05
    assert relative_rms(block_by_hand(a, gamma.mT / gamma), exact) > 0.05


def test_erratum_of_kimi_linear_the_decay_from_i_to_j_starts_after_i():
    """Its section 2.1 defines gamma^{i->j} as the product of alpha_i ... alpha_j; what it uses is gamma_j / gamma_i."""
    a, exact = block()
    alpha = a["g"][0, :, 0].exp()

    def decays(skip):
        return torch.tensor([[alpha[j + skip : i + 1].prod() for j in range(32)] for i in range(32)], dtype=alpha.dtype)

    torch.testing.assert_close(block_by_hand(a, decays(1)), exact, rtol=1e-10, atol=1e-10)
    assert relative_rms(block_by_hand(a, decays(0)), exact) > 0.05


def with_gate(gate):
    """float32 arguments whose gate is a constant, or a reset at every tenth token or so among weak gates."""
    a = inputs("gated_deltanet", B=1, T=256, H=2, HV=2, K=64, V=64, dtype=torch.float32)
    if isinstance(gate, float):
        return a | {"g": torch.full_like(a["g"], gate)}
    hit = torch.rand(a["g"].shape, generator=torch.Generator().manual_seed(0)) < 0.1
    return a | {"g": torch.where(hit, float(gate.removeprefix("reset")), -0.01)}


@pytest.mark.parametrize("form", ["parallel", "chunkwise"])
@pytest.mark.parametrize("gate", [-0.01, -0.3, -1.3, -2.0, -5.0, -7.3, -12.0, -20.0, "reset-60", "reset-1e4"])
def test_float32_is_as_good_as_the_recurrence_for_gates_of_any_strength(gate, form):
    """Outputs, states and every gradient, that of g among them, which at g = -20 is a billionth of the others."""
    a = with_gate(gate)
    double = {name: x.double() for name, x in a.items()}
    *got, slopes = gradients(getattr(gated_deltanet, form), a)
    *exact, exact_slopes = gradients(gated_deltanet.recurrent, double)
    for x, y in zip([*got, *slopes.values()], [*exact, *exact_slopes.values()], strict=True):
        assert relative_rms(x, y) < 1e-6
