"""Mamba: one function in all forms, Euler and zero-order hold, theorem 1, and its place among the other variants."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from operators import with_gradients

from linattn_edu import gla, mamba

TIGHT = dict(rtol=1e-10, atol=1e-10)
FORMS = {
    "recurrent": {},
    "parallel": {},
    "chunkwise": {},
    "chunkwise-1": {"chunk_size": 1},
    "chunkwise-16": {"chunk_size": 16},
    "chunkwise-23": {"chunk_size": 23},
    "fused": {},
}
OTHERS = [form for form in FORMS if form != "recurrent"]
REGIMES = {"strong": (1.0, 4.0), "weak": (0.001, 0.02), "zero": (0.0, 0.0)}
RULES = ["euler", "zoh"]


def inputs(regime="weak", *, B=2, T=37, D=4, N=3, dtype=torch.float64, seed=0, state=True):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    low, high = REGIMES[regime]
    arguments = {
        "u": normal(B, T, D),
        "delta": low + (high - low) * torch.rand(B, T, D, generator=draw, dtype=torch.float64),
        "A": -(1 + torch.arange(N, dtype=torch.float64)).repeat(D, 1) - 0.3 * torch.rand(D, N, generator=draw).double(),
        "B": normal(B, T, N),
        "C": normal(B, T, N),
        "D": normal(D),
    }
    if state:
        arguments["initial_state"] = normal(B, D, N)
    return {key: x.to(dtype) for key, x in arguments.items()}


def run(form, arguments, **more):
    function = getattr(mamba, form.partition("-")[0])
    return function(**arguments, **FORMS[form], **{"output_final_state": True, **more})


def assert_equal(got, expected, **tolerance):
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, **(tolerance or TIGHT))


def by_loops(arguments, discretization):
    """Gu and Dao 2023, eqs. 2 and 4, one number at a time."""
    u, delta, A, B, C, D, h = (arguments[key].tolist() for key in ("u", "delta", "A", "B", "C", "D", "initial_state"))
    y = torch.zeros_like(arguments["u"])
    for b, t, d in torch.cartesian_prod(*(torch.arange(n) for n in y.shape)).tolist():
        y[b, t, d] = D[d] * u[b][t][d]
        for n, a in enumerate(A[d]):
            x = torch.tensor(delta[b][t][d] * a, dtype=torch.float64)
            weight = ((x.exp() - 1) / a).item() if discretization == "zoh" else delta[b][t][d]
            h[b][d][n] = x.exp().item() * h[b][d][n] + weight * B[b][t][n] * u[b][t][d]
            y[b, t, d] += C[b][t][n] * h[b][d][n]
    return y, torch.tensor(h, dtype=torch.float64)


def gradients(form, arguments, **more):
    arguments = with_gradients(arguments)
    draw = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=draw, dtype=x.dtype)).sum() for x in run(form, arguments, **more))
    return torch.autograd.grad(loss, list(arguments.values()))


def part(arguments, start, stop, state):
    cut = {key: x[:, start:stop] if key in ("u", "delta", "B", "C") else x for key, x in arguments.items()}
    return cut | {"initial_state": state}


def token(arguments, t):
    cut = {f"{key}_t": arguments[key][:, t] for key in ("u", "delta", "B", "C")}
    return cut | {"A": arguments["A"], "D": arguments["D"]}


@pytest.mark.parametrize("discretization", RULES)
@pytest.mark.parametrize("regime", REGIMES)
def test_recurrent_is_the_loop(regime, discretization):
    arguments = inputs(regime, T=9)
    assert_equal(run("recurrent", arguments, discretization=discretization), by_loops(arguments, discretization))


@pytest.mark.parametrize("form", OTHERS)
@pytest.mark.parametrize("discretization", RULES)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_form_is_recurrent(regime, discretization, form):
    for T in (1, 2, 16, 37, 70):
        arguments = inputs(regime, T=T)
        expected = run("recurrent", arguments, discretization=discretization)
        assert_equal(run(form, arguments, discretization=discretization), expected)
    rest = {key: x for key, x in arguments.items() if key not in ("D", "initial_state")}
    assert_equal(run(form, rest), run("recurrent", rest))
    assert run(form, rest, output_final_state=False)[1] is None


@pytest.mark.parametrize("form", OTHERS)
@pytest.mark.parametrize("discretization", RULES)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_gradient_is_that_of_recurrent(regime, discretization, form):
    arguments = inputs(regime)
    expected = gradients("recurrent", arguments, discretization=discretization)
    assert_equal(gradients(form, arguments, discretization=discretization), expected)


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise-16"])
@pytest.mark.parametrize("discretization", RULES)
def test_gradcheck(form, discretization):
    arguments = with_gradients(inputs(T=18, B=1, D=2, N=2))

    def function(*xs):
        return run(form, dict(zip(arguments, xs)), discretization=discretization)

    assert torch.autograd.gradcheck(function, list(arguments.values()), fast_mode=True)


@pytest.mark.parametrize("discretization", RULES)
def test_step_by_step_is_one_pass(discretization):
    """Report 28 (mamba#500, #641, #683): step and forward disagree."""
    arguments = inputs()
    y, last = run("recurrent", arguments, discretization=discretization)
    state = arguments["initial_state"]
    for t in range(37):
        y_t, state = mamba.step(**token(arguments, t), state=state, discretization=discretization)
        torch.testing.assert_close(y_t, y[:, t], **TIGHT)
    torch.testing.assert_close(state, last, **TIGHT)
    without_skip = {key: x for key, x in token(arguments, 0).items() if key != "D"}
    y_0 = mamba.step(**without_skip, state=arguments["initial_state"], discretization=discretization)[0]
    torch.testing.assert_close(y_0 + arguments["D"] * arguments["u"][:, 0], y[:, 0], **TIGHT)


def test_step_in_place_overwrites_the_state():
    arguments = inputs()
    state = arguments["initial_state"].clone()
    expected = mamba.step(**token(arguments, 0), state=state)
    y, new = mamba.step(**token(arguments, 0), state=state, inplace=True)
    assert new is state
    assert_equal((y, state), expected)


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise-16"])
def test_split_and_resume_is_one_pass(form):
    arguments = inputs(T=70)
    y, last = run("recurrent", arguments)
    for cut in (0, 1, 15, 16, 33, 69, 70):
        first, state = run(form, part(arguments, 0, cut, arguments["initial_state"]))
        second, state = run(form, part(arguments, cut, 70, state))
        assert_equal((torch.cat([first, second], 1), state), (y, last))


@pytest.mark.parametrize("form", FORMS)
def test_later_tokens_change_no_bit_of_an_earlier_output(form):
    arguments, other = (inputs(T=70, dtype=torch.float32, seed=seed) for seed in (0, 1))
    y, _ = run(form, arguments)
    for cut in (1, 16, 40, 69):
        mixed = {
            key: torch.cat([x[:, :cut], other[key][:, cut:]], 1) if key in ("u", "delta", "B", "C") else x
            for key, x in arguments.items()
        }
        assert torch.equal(run(form, mixed)[0][:, :cut], y[:, :cut])


@pytest.mark.parametrize("form", FORMS)
def test_a_sample_does_not_depend_on_its_batch_and_two_runs_give_the_same_bits(form):
    arguments = inputs(B=3, dtype=torch.float32)
    alone = {key: x[1:2] if key not in ("A", "D") else x for key, x in arguments.items()}
    for x, y in zip(run(form, arguments), run(form, alone)):
        torch.testing.assert_close(x[1:2], y, rtol=1e-6, atol=1e-6 * y.abs().max().item())
    for x, y in zip(gradients(form, arguments), gradients(form, arguments)):
        assert torch.equal(x, y)


@pytest.mark.parametrize("form", FORMS)
def test_no_tokens_pass_the_state_through(form):
    arguments = inputs(T=0)
    y, last = run(form, arguments)
    assert y.shape == (2, 0, 4) and y.dtype == torch.float64
    assert torch.equal(last, arguments["initial_state"]) and last.data_ptr() != arguments["initial_state"].data_ptr()
    assert [x.shape for x in gradients(form, arguments)] == [x.shape for x in arguments.values()]


@pytest.mark.parametrize("form", FORMS)
def test_strides_do_not_matter_and_inputs_stay(form):
    arguments = inputs()
    strided = {key: x.repeat_interleave(2, -1)[..., ::2] for key, x in arguments.items()}
    strided["u"] = strided["u"][..., :1].expand(-1, -1, 4)
    before = [x.clone() for x in strided.values()]
    assert_equal(run(form, strided), run(form, strided | {"u": strided["u"].contiguous()}))
    assert all(torch.equal(x, y) for x, y in zip(strided.values(), before))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise-16"])
def test_low_precision_inputs_are_computed_in_float32(form, dtype):
    rounded = inputs()
    low = rounded | {key: rounded[key].to(dtype) for key in ("u", "B", "C")}
    (y, state), (expected, last) = run(form, low), run(form, {key: x.float() for key, x in low.items()})
    assert y.dtype == dtype and state.dtype == torch.float32
    assert torch.equal(y, expected.to(dtype)) and torch.equal(state, last)
    y_t, state = mamba.step(**token(low, 0), state=low["initial_state"])
    assert y_t.dtype == dtype and state.dtype == torch.float32


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise"])
def test_autocast_does_not_lower_the_arithmetic(form):
    arguments = inputs(dtype=torch.float32)
    expected = run(form, arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, stepped = run(form, arguments), mamba.step(**token(arguments, 0), state=arguments["initial_state"])
    assert all(torch.equal(x, y) for x, y in zip(got, expected))
    assert torch.equal(stepped[0], mamba.step(**token(arguments, 0), state=arguments["initial_state"])[0])


@pytest.mark.parametrize("form", FORMS)
def test_segments_are_one_pass(form, monkeypatch):
    arguments = inputs(T=150)
    expected = run("recurrent", arguments)
    monkeypatch.setattr(mamba, "SEGMENT", 32)
    assert_equal(run(form, arguments), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("discretization", RULES)
@pytest.mark.parametrize("form", FORMS)
def test_large_steps_are_finite_forward_and_backward(form, discretization, dtype):
    """Report 58 (mamba#352, #353, #354, #445, #558): NaN gradients; here Delta = softplus(20) and A = -16."""
    arguments = inputs(T=70, dtype=dtype)
    raw = torch.full_like(arguments["delta"], 20.0).requires_grad_()
    named = with_gradients(arguments | {"A": torch.full_like(arguments["A"], -16.0)})
    y, h = run(form, named | {"delta": F.softplus(raw)}, discretization=discretization)
    held = F.softplus(torch.tensor(20.0, dtype=torch.float64)).item() if discretization == "euler" else 1 / 16
    itself = held * (arguments["B"] * arguments["C"]).sum(-1, keepdim=True) + arguments["D"]
    torch.testing.assert_close(y, itself * arguments["u"], rtol=1e-4, atol=1e-4)  # nothing is left of the past
    inputs_used = [x for key, x in named.items() if key != "delta"] + [raw]
    assert all(x.isfinite().all() for x in torch.autograd.grad(y.sum() + h.sum(), inputs_used))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("delta", [1e-3, 0.1, 1.0, 20.0])
def test_float32_stays_near_the_float64_recurrence(delta, form):
    arguments = inputs(T=256, D=8, N=16)
    arguments["delta"] = torch.full_like(arguments["delta"], delta)
    got = run(form, {key: x.float() for key, x in arguments.items()})
    for x, y in zip(got, run("recurrent", arguments)):
        assert (x.double() - y).square().mean().sqrt() < 1e-5 * y.square().mean().sqrt()


def test_one_state_with_a_softplus_step_is_a_gated_rnn():
    """Gu and Dao 2023, theorem 1: N = 1, A = -1, B = 1 and zero-order hold give h_t = (1 - s_t) h_{t-1} + s_t u_t."""
    draw = torch.Generator().manual_seed(0)
    x, u = torch.randn(2, 2, 37, 4, generator=draw, dtype=torch.float64)
    one = torch.ones(2, 37, 1, dtype=torch.float64)
    s, h, rows = torch.sigmoid(x), torch.zeros(2, 4, dtype=torch.float64), []
    for t in range(37):
        h = (1 - s[:, t]) * h + s[:, t] * u[:, t]
        rows.append(h)
    A = -torch.ones(4, 1, dtype=torch.float64)
    for form in FORMS:
        y, state = run(form, {"u": u, "delta": F.softplus(x), "A": A, "B": one, "C": one}, discretization="zoh")
        torch.testing.assert_close(y, torch.stack(rows, 1), **TIGHT)
        torch.testing.assert_close(state[..., 0], h, **TIGHT)
    euler = run("recurrent", {"u": u, "delta": F.softplus(x), "A": A, "B": one, "C": one})[0]
    assert (euler - torch.stack(rows, 1)).abs().max() > 0.1  # the theorem is about the paper's rule, not the code's


def test_euler_and_zero_order_hold_differ_by_half_delta_squared():
    """Per token Bbar differs by Delta^2 A B / 2 + O(Delta^3): a third order remains once that term is taken out."""
    A = torch.tensor([[-1.0, -4.0, -16.0]], dtype=torch.float64)
    error, rest = [], []
    for delta in (1e-2, 5e-3, 2.5e-3):
        gap = mamba.zoh(torch.tensor([[delta]], dtype=torch.float64), A) - delta
        error.append(gap)
        rest.append(gap - delta**2 * A / 2)
    for halved in (0, 1):
        torch.testing.assert_close(error[halved] / error[halved + 1], torch.full_like(A, 4), rtol=0.05, atol=0)
        torch.testing.assert_close(rest[halved] / rest[halved + 1], torch.full_like(A, 8), rtol=0.05, atol=0)


def test_over_a_fixed_time_euler_and_zero_order_hold_differ_by_delta():
    """1 / Delta tokens of error Delta^2 each: halving Delta halves the difference of the states."""
    first, gaps = inputs(T=1, B=1, state=False), []
    for T in (64, 128, 256):
        arguments = {key: x.expand(-1, T, -1) if key in ("u", "B", "C") else x for key, x in first.items()}
        arguments["delta"] = torch.full((1, T, 4), 1 / T, dtype=torch.float64)
        states = [run("chunkwise", arguments, discretization=rule)[1] for rule in RULES]
        gaps.append((states[0] - states[1]).abs().max())
    assert 1.95 < gaps[0] / gaps[1] < 2.05 and 1.95 < gaps[1] / gaps[2] < 2.05


def test_zero_order_hold_solves_the_differential_equation():
    """h' = A h + B u with u held: h(Delta) from many small Euler steps, and from one step of zero-order hold."""
    A, delta, n = torch.tensor([[-1.5]], dtype=torch.float64), 0.8, 100_000
    h = 0.0
    for _ in range(n):
        h += delta / n * (A.item() * h + 1.0)
    assert abs(mamba.zoh(torch.tensor([[delta]], dtype=torch.float64), A).item() - h) < 1e-5


@pytest.mark.parametrize("a", [0.0, 1e-9, 1e-5, 1e-3, 0.00999, 0.01001, 0.5, 700.0])
def test_zero_order_hold_is_smooth_where_the_quotient_is_not(a):
    delta = torch.tensor([[1.0]], dtype=torch.float64, requires_grad=True)
    A = torch.tensor([[-a]], dtype=torch.float64, requires_grad=True)
    y = mamba.zoh(delta, A)
    dA, d_delta = torch.autograd.grad(y.sum(), [A, delta])
    if a < 1:
        terms = [(-a) ** i / math.factorial(i + 1) for i in range(30)]
        slopes = [i * (-a) ** (i - 1) / math.factorial(i + 1) for i in range(1, 30)]
        assert abs(y.item() - sum(terms)) < 1e-14
        assert abs(dA.item() - sum(slopes)) < 1e-12
    else:
        assert abs(y.item() - 1 / a) < 1e-14 and abs(dA.item() - 1 / a**2) < 1e-14
    assert abs(d_delta.item() - math.exp(-a)) < 1e-13


def test_zero_order_hold_keeps_its_digits_in_float32():
    """The derivative by A of the plain quotient loses four of its seven digits at Delta A = -1e-3."""
    A = -torch.logspace(-6, 1, 200, dtype=torch.float64)[None]
    slopes = []
    for x in (A.float().requires_grad_(), A.float().double().requires_grad_()):
        slopes.append(torch.autograd.grad(mamba.zoh(torch.ones(1, 1, dtype=x.dtype), x).sum(), x)[0].double())
    assert ((slopes[0] - slopes[1]).abs() < 1e-4 * slopes[1]).all()


@pytest.mark.parametrize("regime", REGIMES)
def test_mamba_is_gated_linear_attention_with_one_head_a_channel(regime):
    """q = C, k = B, v = Delta u with V = 1, g = Delta A, no scale; h is the transposed state."""
    arguments = inputs(regime)
    u, delta, A, B, C, D, h = arguments.values()
    o, S = gla.chunkwise(
        C[:, :, None],
        B[:, :, None],
        (delta * u)[..., None],
        g=delta[..., None] * A,
        scale=1.0,
        initial_state=h[..., None],
        output_final_state=True,
    )
    assert_equal(run("chunkwise", arguments), (o[..., 0] + D * u, S[..., 0]))


def test_a_constant_step_is_a_convolution():
    """Gu and Dao 2023, eq. 3: without selection y = u * (C Bbar, C Abar Bbar, C Abar^2 Bbar, ...)."""
    arguments = inputs(state=False, B=1)
    arguments |= {key: arguments[key][:, :1].expand(-1, 37, -1) for key in ("B", "C")}
    arguments["delta"] = torch.full_like(arguments["delta"], 0.1)
    n = torch.arange(37, dtype=torch.float64)
    powers = (0.1 * arguments["A"][..., None] * n).exp()
    kernel = torch.einsum("n,dnt,n->dt", arguments["C"][0, 0], powers, 0.1 * arguments["B"][0, 0])
    u = arguments["u"][0]
    expected = torch.stack([sum(kernel[:, i] * u[t - i] for i in range(t + 1)) for t in range(37)])
    torch.testing.assert_close(run("parallel", arguments)[0][0], expected + arguments["D"] * u, **TIGHT)


def test_signatures_are_those_of_the_contract():
    tensors, options = ["u", "delta", "A", "B", "C"], ["D", "initial_state", "output_final_state", "discretization"]
    for form in ("recurrent", "parallel", "chunkwise", "fused"):
        more = {"chunkwise": ["chunk_size"], "fused": ["chunk_size", "backend"]}
        expected = [*tensors, *options, *more.get(form, [])]
        assert list(inspect.signature(getattr(mamba, form)).parameters) == expected
    step = ["u_t", "delta_t", "A", "B_t", "C_t", "state", "D", "discretization", "inplace"]
    assert list(inspect.signature(mamba.step).parameters) == [*step, "backend"]
    for form in ("recurrent", "parallel", "chunkwise", "fused", "step"):
        for word in ("Args:", "Returns:", "Raises:", "Source:", "[B,"):
            assert word in getattr(mamba, form).__doc__


BAD = [
    (ValueError, {"u": lambda x: x[0]}, "`u`: got shape [37, 4], expected [B, T, D]"),
    (ValueError, {"delta": lambda x: x.mT}, "`delta`: got shape [2, 4, 37], expected [B, T, D] with B = 2"),
    (ValueError, {"A": lambda x: x.mT}, "`A`: got shape [3, 4], expected [D, N] with D = 4 as in `u`"),
    (ValueError, {"B": lambda x: x[..., :2]}, "`B`: got shape [2, 37, 2], expected [B, T, N]"),
    (ValueError, {"C": lambda x: x.float()}, "`C`: got dtype torch.float32, expected torch.float64 as in `u`"),
    (ValueError, {"D": lambda x: x[:3]}, "`D`: got shape [3], expected [D] with D = 4 as in `u`"),
    (ValueError, {"u": lambda x: x.long()}, "`u`: got dtype torch.int64, expected a floating dtype"),
    (ValueError, {"B": lambda x: x.to("meta")}, "`B`: got device meta, expected cpu as in `u`"),
    (ValueError, {"initial_state": lambda x: x.mT}, "`initial_state`: got shape [2, 3, 4], expected [B, D, N]"),
    (ValueError, {"discretization": "bilinear"}, "`discretization`: got 'bilinear', expected one of euler, zoh"),
    (TypeError, {"A": None}, "`A`: got nothing (None), expected a tensor [D, N]"),
    (TypeError, {"delta": 0.1}, "`delta`: got float 0.1, expected a tensor [B, T, D]"),
    (TypeError, {"output_final_state": 1}, "`output_final_state`: got int 1, expected True or False"),
    (TypeError, {"cu_seqlens": torch.tensor([0, 37])}, "got the unknown argument `cu_seqlens`, expected `u`, `delta`"),
]


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise", "fused"])
@pytest.mark.parametrize("error, change, message", BAD)
def test_bad_arguments_are_named(error, change, message, form):
    arguments = inputs()
    for key, new in change.items():
        arguments[key] = new(arguments[key]) if callable(new) else new
    with pytest.raises(error) as raised:
        getattr(mamba, form)(**arguments)
    assert message in str(raised.value)


def test_bad_calls_are_named():
    arguments = inputs()
    with pytest.raises(TypeError, match="got no argument `delta`"):
        mamba.recurrent(arguments["u"])
    with pytest.raises(ValueError, match="`chunk_size`: got 0, expected a whole number of at least 1"):
        mamba.chunkwise(**arguments, chunk_size=0)
    with pytest.raises(TypeError, match=r"`state`: got nothing \(None\), expected"):
        mamba.step(**token(arguments, 0), state=None)
    with pytest.raises(ValueError, match=r"`u_t`: got shape \[2, 37, 4\], expected \[B, D\]"):
        mamba.step(**token(arguments, 0) | {"u_t": arguments["u"]}, state=arguments["initial_state"])
