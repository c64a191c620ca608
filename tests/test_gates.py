"""Gates: their equations against plain numbers, their ranges, extreme inputs, and dtypes."""

import math

import pytest
import torch

from linattn_edu import gates, gla, kda

TIGHT = dict(rtol=1e-10, atol=1e-10)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def softplus(x):
    return math.log1p(math.exp(-abs(x))) + max(x, 0)


def tensor(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


X = [-30.0, -3.0, -0.5, 0.0, 0.7, 4.0, 15.0]


def parameters(H=2, K=3):
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 5, H), (H,), (H,), (2, 5, H, K), (H, K)]
    return [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]


def test_mamba2_decay_is_its_equation():
    for x in X:
        got = gates.mamba2_decay(tensor(x, x).reshape(1, 1, 2), tensor(0.3, -2.0), tensor(0.1, -4.0))
        expected = tensor(-math.exp(0.3) * softplus(x + 0.1), -math.exp(-2.0) * softplus(x - 4.0))
        torch.testing.assert_close(got[0, 0], expected, **TIGHT)


def test_kda_decay_is_mamba2_decay_in_every_channel():
    _, A_log, _, x, dt_bias = parameters()
    g = gates.kda_decay(x, A_log, dt_bias)
    assert g.shape == x.shape
    for c in range(3):
        torch.testing.assert_close(g[..., c], gates.mamba2_decay(x[..., c], A_log, dt_bias[:, c]), **TIGHT)


def test_kda_bounded_decay_is_its_equation():
    _, A_log, _, x, dt_bias = parameters()
    for bound in (-5.0, -2.5):
        g = gates.kda_bounded_decay(x, A_log, dt_bias, lower_bound=bound)
        for h, c in ((0, 0), (1, 2)):
            z = math.exp(A_log[h]) * (x[1, 3, h, c].item() + dt_bias[h, c].item())
            assert abs(g[1, 3, h, c].item() - bound * sigmoid(z)) < 1e-12
    default, bounded = (gates.kda_bounded_decay(x, A_log, dt_bias, **bound) for bound in ({}, {"lower_bound": -5}))
    assert torch.equal(default, bounded)


def test_the_two_kda_gates_are_two_functions():
    """Report 51 (vllm#43833): one fixed input, A_log = log 2, x + dt_bias = 1."""
    x, A_log, dt_bias = torch.full((1, 1, 1, 1), 0.75), torch.tensor([math.log(2.0)]), torch.tensor([[0.25]])
    unbounded, bounded = gates.kda_decay(x, A_log, dt_bias), gates.kda_bounded_decay(x, A_log, dt_bias)
    assert abs(unbounded.item() - -2.6265234) < 1e-6  # -2 log(1 + e)
    assert abs(bounded.item() - -4.4039854) < 1e-6  # -5 / (1 + e^-2)


def test_a_bounded_gate_survives_sixteen_tokens_and_its_inverse():
    """Report 61 (FlashKDA#7): exp(-g) of an unbounded gate is infinite; the bound of -5 keeps 16 tokens below 88.7."""
    x = torch.full((1, 16, 1, 1), 1e4)
    g = gates.kda_bounded_decay(x, torch.zeros(1), torch.zeros(1, 1))
    assert torch.equal(g, torch.full_like(g, -5.0))
    assert (-g.sum()).exp().isfinite() and g.sum().exp() > 0
    unbounded = gates.kda_decay(x, torch.zeros(1), torch.zeros(1, 1))
    assert not (-unbounded.sum()).exp().isfinite()


def test_gla_decay_is_the_root_of_a_sigmoid():
    for x in X:
        assert abs(gates.gla_decay(tensor(x)).exp().item() - sigmoid(x) ** (1 / 16)) < 1e-12
        assert abs(gates.gla_decay(tensor(x), tau=2.0).exp().item() - sigmoid(x) ** 0.5) < 1e-12
    assert abs(math.log(0.5) / gates.gla_decay(tensor(0.0)).item() - 16) < 1e-12


def test_write_strength_is_a_sigmoid_or_two():
    for x in X:
        assert abs(gates.write_strength(tensor(x)).item() - sigmoid(x)) < 1e-12
        assert abs(gates.write_strength(tensor(x), negative_eigenvalues=True).item() - 2 * sigmoid(x)) < 1e-12


GATES = {
    "mamba2_decay": lambda x, a, b: gates.mamba2_decay(x[..., 0], a, b[:, 0]),
    "kda_decay": gates.kda_decay,
    "kda_bounded_decay": gates.kda_bounded_decay,
    "gla_decay": lambda x, a, b: gates.gla_decay(x),
    "write_strength": lambda x, a, b: gates.write_strength(x),
}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("x", [-1e6, -1e4, -100.0, 0.0, 100.0, 1e4, 1e6])
@pytest.mark.parametrize("A_log", [-100.0, 0.0, math.log(16)])
def test_extreme_inputs_are_finite_forward_and_backward(name, x, A_log):
    xs = [torch.full((1, 2, 2, 3), x), torch.full((2,), A_log), torch.zeros(2, 3)]
    y = GATES[name](*(z.requires_grad_() for z in xs))
    assert y.dtype == torch.float32 and y.isfinite().all()
    assert (y >= 0).all() and (y <= 1).all() if name == "write_strength" else (y <= 0).all()
    for grad in torch.autograd.grad(y.sum(), xs, materialize_grads=True):
        assert grad.isfinite().all()


@pytest.mark.parametrize("name", GATES)
def test_gradcheck(name):
    _, A_log, _, x, dt_bias = parameters()
    xs = [z.requires_grad_() for z in (x[:1, :2], A_log, dt_bias)]
    used = 3 if name not in ("gla_decay", "write_strength") else 1
    assert torch.autograd.gradcheck(lambda *zs: GATES[name](*zs, *xs[used:]), xs[:used])


@pytest.mark.parametrize("name", GATES)
def test_low_precision_is_computed_in_float32(name):
    xs = [torch.randn(2, 5, 2, 3).bfloat16(), torch.randn(2).bfloat16(), torch.randn(2, 3).bfloat16()]
    y = GATES[name](*xs)
    assert y.dtype == torch.float32
    assert torch.equal(y, GATES[name](*(z.float() for z in xs)))
    assert GATES[name](xs[0].double(), *xs[1:]).dtype == torch.float64


def test_gates_are_what_the_forms_take():
    x, A_log, dt_bias_scalar, channels, dt_bias = parameters()
    q, k, v = torch.randn(3, 2, 5, 2, 3, dtype=torch.float64)
    assert gla.recurrent(q, k, v, g=gates.gla_decay(channels))[0].shape == v.shape
    named = {"g": gates.kda_decay(channels, A_log, dt_bias), "beta": gates.write_strength(x)}
    o, state = kda.recurrent(q, k, v, **named, output_final_state=True)
    at_t = {"g": gates.kda_decay(channels[:, 0], A_log, dt_bias), "beta": gates.write_strength(x[:, 0])}
    zero = torch.zeros_like(state)
    torch.testing.assert_close(kda.step(q[:, 0], k[:, 0], v[:, 0], zero, **at_t)[0], o[:, 0], **TIGHT)
    assert gates.mamba2_decay(x[:, 0], A_log, dt_bias_scalar).shape == (2, 2)


BAD = [
    (ValueError, "mamba2_decay", {"A_log": lambda x: x[:1]}, "`A_log`: got shape [1], expected [HV] with HV = 2"),
    (ValueError, "mamba2_decay", {"x": lambda x: x[0, 0]}, "`x`: got shape [2], expected [B, HV]"),
    (ValueError, "kda_decay", {"dt_bias": lambda x: x[0]}, "`dt_bias`: got shape [3], expected [HV, K] with HV = 2"),
    (ValueError, "kda_decay", {"x": lambda x: x.long()}, "`x`: got dtype torch.int64, expected a floating dtype"),
    (ValueError, "kda_bounded_decay", {"lower_bound": 0}, "`lower_bound`: got 0, expected a finite negative number"),
    (ValueError, "gla_decay", {"tau": 0}, "`tau`: got 0, expected a finite positive number"),
    (ValueError, "write_strength", {"x": lambda x: x.long()}, "`x`: got dtype torch.int64, expected a floating dtype"),
    (TypeError, "mamba2_decay", {"bias": 1}, "got the unknown argument `bias`, expected `x`, `A_log`, `dt_bias`"),
    (TypeError, "gla_decay", {"x": 0.5}, "`x`: got float 0.5, expected a tensor"),
    (TypeError, "write_strength", {"negative_eigenvalues": 1}, "got int 1, expected True or False"),
]


@pytest.mark.parametrize("error, name, change, message", BAD)
def test_bad_arguments_are_named(error, name, change, message):
    x, A_log, dt_bias_scalar, channels, dt_bias = parameters()
    arguments = {
        "mamba2_decay": {"x": x, "A_log": A_log, "dt_bias": dt_bias_scalar},
        "kda_decay": {"x": channels, "A_log": A_log, "dt_bias": dt_bias},
        "kda_bounded_decay": {"x": channels, "A_log": A_log, "dt_bias": dt_bias},
        "gla_decay": {"x": channels},
        "write_strength": {"x": x},
    }[name]
    for key, new in change.items():
        arguments[key] = new(arguments[key]) if callable(new) else new
    with pytest.raises(error) as raised:
        getattr(gates, name)(**arguments)
    assert message in str(raised.value)
