"""What is particular to channel-wise decay: equal channels, scores that never overflow, strong gates, odd widths."""

import pytest
import torch
from operators import inputs, with_gradients

from linattn_edu import decay, gla, linear
from linattn_edu.algebra import channel_scores

TIGHT = dict(rtol=1e-10, atol=1e-10)


def relative_rms(x, y):
    return ((x.double() - y).square().mean().sqrt() / y.square().mean().sqrt()).item()


def gates_of(shape, gate):
    """A constant, or one token in ten that forgets everything among tokens that forget almost nothing."""
    if gate != "reset":
        return torch.full(shape, gate, dtype=torch.float64)
    reset = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.1
    return torch.where(reset, -60.0, -0.01).double()


def scores_by_definition(q, k, g):
    C, G = q.shape[-2], g.cumsum(-2)
    D = G[..., :, None, :] - G[..., None, :, :]
    D = D.masked_fill(torch.ones(C, C, dtype=torch.bool).triu(1)[..., None], -torch.inf).exp()
    return (q[..., :, None, :] * k[..., None, :, :] * D).sum(-1)


@pytest.mark.parametrize("regime", ["strong", "weak", "zero"])
@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise"])
def test_equal_channels_are_the_scalar_decay(form, regime):
    arguments = inputs("decay", regime, T=70)
    channels = arguments | {"g": arguments["g"][..., None].expand(-1, -1, -1, 5)}
    o, S = getattr(gla, form)(**channels, output_final_state=True)
    expected, last = decay.recurrent(**arguments, output_final_state=True)
    torch.testing.assert_close(o, expected, **TIGHT)
    torch.testing.assert_close(S, last, **TIGHT)


def test_zero_gate_is_unnormalised_linear_attention():
    """Report 5 (flash-linear-attention#104, #463): a gate of 1 has to be no gate."""
    arguments = inputs("gla", "zero", T=70)
    plain = {key: x for key, x in arguments.items() if key != "g"} | {"feature_map": "identity", "normalize": False}
    expected, last = linear.recurrent(**plain, output_final_state=True)
    o, S = gla.chunkwise(**arguments, output_final_state=True)
    torch.testing.assert_close(o, expected, **TIGHT)
    torch.testing.assert_close(S, last, **TIGHT)


def test_a_channel_forgets_at_its_own_rate():
    """Row c of the state is a scalar decay with the gate of channel c, written and read by channel c alone."""
    arguments = inputs("gla", H=4, HV=4)
    o, S = gla.chunkwise(**arguments, output_final_state=True)
    total = 0
    for c in range(5):
        row = arguments | {key: arguments[key][..., c : c + 1] for key in ("q", "k")}
        row |= {"g": arguments["g"][..., c], "initial_state": arguments["initial_state"][:, :, c : c + 1]}
        part, S_c = decay.recurrent(**row, scale=5**-0.5, output_final_state=True)
        torch.testing.assert_close(S[:, :, c : c + 1], S_c, **TIGHT)
        total = total + part
    torch.testing.assert_close(o, total, **TIGHT)


@pytest.mark.parametrize("C", [0, 1, 2, 3, 5, 8, 13, 31, 64, 77])
@pytest.mark.parametrize("strength", [0.0, 0.05, 8.0])
def test_channel_scores_are_their_definition(C, strength):
    draw = torch.Generator().manual_seed(C)
    q, k, g = torch.randn(3, 2, C, 5, generator=draw, dtype=torch.float64)
    g = -strength * g.abs()
    torch.testing.assert_close(channel_scores(q, k, g), scores_by_definition(q, k, g), **TIGHT)


def test_channel_scores_take_several_kinds_of_queries():
    q, k, g = torch.randn(3, 2, 13, 5, dtype=torch.float64)
    g = -g.abs()
    both = channel_scores(torch.stack([q, k]), k, g)
    torch.testing.assert_close(both, torch.stack([channel_scores(q, k, g), channel_scores(k, k, g)]), **TIGHT)


@pytest.mark.parametrize("C", [6, 7])
def test_channel_scores_differentiate(C):
    q, k, g = torch.randn(3, 2, C, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(channel_scores, [x.requires_grad_() for x in (q, k, -g.abs())])


@pytest.mark.parametrize("C", [16, 37, 64])
def test_no_exponent_is_positive(C, monkeypatch):
    """Queries scaled by exp(G_i) and keys by exp(-G_j) overflow from G = -88.7: no factor here may exceed 1."""
    exp, seen = torch.Tensor.exp, []
    monkeypatch.setattr(torch.Tensor, "exp", lambda x: seen.append(x.max().item()) or exp(x))
    q, k = torch.randn(2, 3, C, 4)
    assert channel_scores(q, k, -30 * torch.rand(3, C, 4)).isfinite().all()
    assert seen and max(seen) <= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gate", [-50.0, -100.0, -1000.0, -1e4])
def test_very_strong_gates_are_finite_forward_and_backward(gate, dtype):
    """Reports 2, 3 and 4 (flash-linear-attention#99, #122, transformers#48455): finite outputs, NaN gradients."""
    arguments = inputs("gla", T=128, dtype=dtype)
    arguments["g"] = torch.full_like(arguments["g"], gate)
    itself = arguments["v"] * (arguments["q"] * arguments["k"]).sum(-1, keepdim=True).repeat_interleave(2, 2)
    for form in ("recurrent", "parallel", "chunkwise"):
        named = with_gradients(arguments)
        o, S = getattr(gla, form)(**named, output_final_state=True)
        torch.testing.assert_close(o, itself * 5**-0.5, rtol=1e-5, atol=1e-5)  # only the token itself is left
        for x in torch.autograd.grad(o.sum() + S.sum(), list(named.values())):
            assert x.isfinite().all()


@pytest.mark.parametrize("form", ["parallel", "chunkwise"])
def test_gradients_at_moderate_gates_are_right_in_float32(form):
    """Report 4 (transformers#48455): T = 64, g = -2, where a forward that is finite had gradients that were not."""
    arguments = inputs("gla", T=64, K=16, V=16)
    arguments["g"] = torch.full_like(arguments["g"], -2.0)
    draw = torch.randn(arguments["v"].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def gradients(function, dtype):
        named = with_gradients({key: x.to(dtype) for key, x in arguments.items()})
        return torch.autograd.grad((function(**named)[0] * draw.to(dtype)).sum(), list(named.values()))

    for x, y in zip(gradients(getattr(gla, form), torch.float32), gradients(gla.recurrent, torch.float64), strict=True):
        assert relative_rms(x, y) < 1e-5


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise"])
@pytest.mark.parametrize("gate", [-0.01, -0.1, -1.0, -1.3, -2.0, -5.0, -10.0, -20.0, "reset"])
def test_float32_stays_near_the_float64_recurrence(gate, form):
    arguments = inputs("gla", T=256, K=64, V=64)
    arguments["g"] = gates_of(arguments["g"].shape, gate)
    expected, last = gla.recurrent(**arguments, output_final_state=True)
    o, S = getattr(gla, form)(**{key: x.float() for key, x in arguments.items()}, output_final_state=True)
    bound = 1e-4 if gate == "reset" else 1e-5
    assert relative_rms(o, expected) < bound
    assert relative_rms(S, last) < bound


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise", "step"])
def test_the_sign_of_the_gate_is_part_of_the_contract(form):
    """Report 1 (flash-linear-attention#215): a gate of +176 overflowed. That g <= 0 is said, not clamped."""
    assert "natural-log decay, finite and at most 0" in getattr(gla, form).__doc__


@pytest.mark.parametrize("T", [1, 2, 7, 8, 15, 17, 63, 65, 79, 127])
def test_any_length(T):
    """Reports 14 and 15 (flash-linear-attention#636, #792): short sequences, and last blocks that are not full."""
    arguments = inputs("gla", T=T)
    (o, S), (expected, last) = (f(**arguments, output_final_state=True) for f in (gla.chunkwise, gla.recurrent))
    torch.testing.assert_close(o, expected, **TIGHT)
    torch.testing.assert_close(S, last, **TIGHT)


@pytest.mark.parametrize("K, V", [(60, 100), (100, 48), (153, 64), (128, 64), (64, 256), (128, 512), (24, 40)])
def test_any_width(K, V):
    """Reports 16, 17 and 18 (flash-linear-attention#1134, #1241, #589): widths odd, unequal, no power of two."""
    arguments = inputs("gla", B=1, T=66, H=1, HV=1, K=K, V=V)
    (o, S), (expected, last) = (f(**arguments, output_final_state=True) for f in (gla.chunkwise, gla.recurrent))
    torch.testing.assert_close(o, expected, **TIGHT)
    torch.testing.assert_close(S, last, **TIGHT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_the_initial_state_has_the_dtype_it_came_in(dtype):
    """Report 36 (flash-linear-attention#36): the gradient of an initial state, in float32 and in bfloat16."""
    arguments = {key: x.float() for key, x in inputs("gla").items()}
    S = arguments["initial_state"].to(dtype).requires_grad_()
    upcast = S.detach().float().requires_grad_()
    for state in (S, upcast):
        gla.chunkwise(**arguments | {"initial_state": state})[0].square().sum().backward()
    assert S.grad.dtype == dtype
    torch.testing.assert_close(S.grad, upcast.grad.to(dtype), rtol=0, atol=0)


def test_state_is_float32_and_grows_beyond_half_precision():
    """Report 53: 2^17 is not a float16; the state has to hold it all the same."""
    ones = torch.ones(1, 64, 1, 1, dtype=torch.float16)
    g = torch.zeros(1, 64, 1, 1)
    for form in ("recurrent", "parallel", "chunkwise"):
        S = getattr(gla, form)(ones, 64 * ones, 32 * ones, g=g, output_final_state=True)[1]
        assert S.dtype == torch.float32 and S.item() == 2.0**17


@pytest.mark.parametrize("form", ["parallel", "chunkwise"])
def test_a_loss_on_the_final_state_alone_reaches_every_input_but_q(form):
    """Report 37 (xma#445, mamba#101): the gradient of the final state was dropped."""

    def gradients(function):
        named = with_gradients(inputs("gla", T=70))
        state = function(**named, output_final_state=True)[1]
        return torch.autograd.grad(state.square().sum(), list(named.values()), materialize_grads=True)

    for name, x, y in zip(inputs("gla"), gradients(getattr(gla, form)), gradients(gla.recurrent), strict=True):
        torch.testing.assert_close(x, y, **TIGHT)
        assert (x.abs().max() > 0) == (name != "q")
