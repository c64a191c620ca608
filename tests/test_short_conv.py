"""The short convolution: torch's own as the oracle, the state, short chunks, packed sequences."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from linattn_edu import short_conv
from linattn_edu.short_conv import causal_conv

TIGHT = dict(rtol=1e-10, atol=1e-10)


def inputs(B=2, T=11, D=3, W=4, N=None, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    shapes = {"x": (B, T, D), "weight": (D, W), "bias": (D,), "initial_state": (N or B, D, W - 1)}
    return {key: torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype) for key, shape in shapes.items()}


def with_grad(arguments):
    return {key: x.clone().requires_grad_() for key, x in arguments.items()}


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("W", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("T", [0, 1, 2, 3, 11])
def test_causal_conv_is_torchs_conv1d(T, W, activation):
    arguments = inputs(T=T, W=W)
    y, state = causal_conv(**arguments, activation=activation, output_final_state=True)
    seen = torch.cat([arguments["initial_state"], arguments["x"].mT], -1)
    if T:
        expected = F.conv1d(seen, arguments["weight"][:, None], arguments["bias"], groups=3).mT
        torch.testing.assert_close(y, F.silu(expected) if activation else expected, **TIGHT)
    assert y.shape == (2, T, 3) and torch.equal(state, seen[..., T:])


def test_without_a_state_the_past_is_zero():
    arguments = inputs()
    zero = arguments | {"initial_state": torch.zeros(2, 3, 3, dtype=torch.float64)}
    x, weight, bias, _ = arguments.values()
    assert torch.equal(causal_conv(x, weight, bias)[0], causal_conv(**zero)[0])
    assert causal_conv(x, weight, bias)[1] is None
    torch.testing.assert_close(causal_conv(x, weight)[0] + bias, causal_conv(x, weight, bias)[0], **TIGHT)


def test_the_last_tap_belongs_to_the_token():
    x, weight = inputs()["x"], torch.tensor([[0.0, 0.0, 0.0, 1.0]] * 3, dtype=torch.float64)
    assert torch.equal(causal_conv(x, weight)[0], x)
    assert torch.equal(causal_conv(x, weight.roll(-1, -1))[0][:, 1:], x[:, :-1])


def test_a_checkpoint_of_conv1d_fits():
    layer = torch.nn.Conv1d(3, 3, 4, groups=3, padding=3).double()
    x = inputs()["x"]
    torch.testing.assert_close(causal_conv(x, layer.weight[:, 0], layer.bias)[0], layer(x.mT).mT[:, :11], **TIGHT)


def test_gradcheck():
    arguments = with_grad(inputs(B=1, T=5, D=2))

    def function(*xs):
        return causal_conv(**dict(zip(arguments, xs)), activation="silu", output_final_state=True)

    assert torch.autograd.gradcheck(function, list(arguments.values()))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # in forward mode
@pytest.mark.parametrize("bounds", [None, [0, 2, 2, 11]])
def test_forward_derivatives_are_the_backward_ones(bounds):
    """<dy, J dx> is the same read from either side."""
    arguments = inputs(B=1, N=1 if bounds is None else 3)
    packed = None if bounds is None else torch.tensor(bounds)

    def function(*xs):
        return causal_conv(**dict(zip(arguments, xs)), activation="silu", cu_seqlens=packed)[0]

    directions = tuple(torch.cos(1 + x) for x in arguments.values())
    y, forward = torch.func.jvp(function, tuple(arguments.values()), directions)
    named = with_grad(arguments)
    weight = torch.sin(y)
    gradients = torch.autograd.grad((function(*named.values()) * weight).sum(), list(named.values()))
    backward = sum((g * d).sum() for g, d in zip(gradients, directions))
    torch.testing.assert_close((forward * weight).sum(), backward, **TIGHT)


@pytest.mark.parametrize("lengths", [[1] * 11, [2, 1, 2, 2, 4], [0, 3, 0, 8, 0], [10, 1]])
def test_chained_calls_are_one_and_so_are_their_gradients(lengths):
    """Report 34 (flash-linear-attention#1140): chunks shorter than W - 1 gave a wrong gradient of the initial state."""

    def chained(named, lengths):
        state, outputs = named["initial_state"], []
        for x in named["x"].split(lengths, 1):
            y, state = causal_conv(
                x, named["weight"], named["bias"], activation="silu", initial_state=state, output_final_state=True
            )
            outputs.append(y)
        return torch.cat(outputs, 1), state

    draw = torch.randn(2, 11, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for pieces in (lengths, [11]):
        named = with_grad(inputs())
        y, state = chained(named, pieces)
        results.append([y, state, *torch.autograd.grad((y * draw).sum() + state.square().sum(), list(named.values()))])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, **TIGHT)


@pytest.mark.parametrize("T", [1, 2])
def test_gradient_of_the_state_reaches_past_a_short_chunk(T):
    """Report 34: with T < W - 1 part of the initial state is still in the final one."""
    named = with_grad(inputs(T=T))
    state = causal_conv(**named, output_final_state=True)[1]
    grad = torch.autograd.grad(state.sum(), named["initial_state"])[0]
    assert torch.equal(grad, torch.cat([torch.zeros(2, 3, T), torch.ones(2, 3, 3 - T)], -1).double())


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("W", [1, 4])
def test_step_by_step_is_one_pass(W, activation):
    arguments = inputs(W=W)
    y, last = causal_conv(**arguments, activation=activation, output_final_state=True)
    state = arguments["initial_state"]
    for t in range(11):
        y_t, state = short_conv.step(
            arguments["x"][:, t], arguments["weight"], state, arguments["bias"], activation=activation
        )
        torch.testing.assert_close(y_t, y[:, t], **TIGHT)
    assert torch.equal(state, last)


def test_step_in_place_overwrites_the_state():
    arguments = inputs()
    x, weight, bias, state = arguments.values()
    expected = short_conv.step(x[:, 0], weight, state, bias)
    y, new = short_conv.step(x[:, 0], weight, state, bias, inplace=True)
    assert new is state and torch.equal(y, expected[0]) and torch.equal(state, expected[1])
    with pytest.raises(ValueError, match="`state`: got dtype torch.float32, expected torch.float64"):
        short_conv.step(x[:, 0], weight, state.float(), bias, inplace=True)


PACKED = [[0, 0, 1, 3, 3, 11, 11], [0, 11], [0, 2, 4, 6, 8, 10, 11], [0, 0, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bounds", PACKED)
@pytest.mark.parametrize("W", [1, 2, 4, 7])
def test_packed_is_separate(W, bounds, dtype):
    """Report 27 (SkyRL#2056): a packed document must not see the one before it."""
    T, N, tight = bounds[-1], len(bounds) - 1, {"rtol": 1e-12, "atol": 1e-12}
    arguments = inputs(B=1, T=T, W=W, N=N)
    packed = torch.tensor(bounds, dtype=dtype)
    draw = torch.randn(1, T, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    named = with_grad(arguments)
    y, state = causal_conv(**named, activation="silu", cu_seqlens=packed, output_final_state=True)
    grads = torch.autograd.grad((y * draw).sum() + state.square().sum(), list(named.values()))
    named, loss = with_grad(arguments), 0
    for n, (start, stop) in enumerate(zip(bounds, bounds[1:])):
        alone = named | {"x": named["x"][:, start:stop], "initial_state": named["initial_state"][n : n + 1]}
        y_n, state_n = causal_conv(**alone, activation="silu", output_final_state=True)
        torch.testing.assert_close(y[:, start:stop], y_n, **tight)
        assert torch.equal(state[n : n + 1], state_n)
        loss = loss + (y_n * draw[:, start:stop]).sum() + state_n.square().sum()
    for x, expected in zip(grads, torch.autograd.grad(loss, list(named.values())), strict=True):
        torch.testing.assert_close(x, expected, **tight)
    zero = causal_conv(**{key: x for key, x in arguments.items() if key != "initial_state"}, cu_seqlens=packed)[0]
    for start, stop in zip(bounds, bounds[1:]):
        expected = causal_conv(arguments["x"][:, start:stop], arguments["weight"], arguments["bias"])[0]
        torch.testing.assert_close(zero[:, start:stop], expected, **tight)


def test_no_sequences_at_all():
    arguments = inputs(B=1, T=0) | {"initial_state": torch.zeros(0, 3, 3, dtype=torch.float64)}
    y, state = causal_conv(**arguments, cu_seqlens=torch.tensor([0]), output_final_state=True)
    assert y.shape == (1, 0, 3) and state.shape == (0, 3, 3)


def test_gradcheck_packed():
    arguments = with_grad(inputs(B=1, T=5, D=2, N=3))

    def function(*xs):
        named = dict(zip(arguments, xs)) | {"cu_seqlens": torch.tensor([0, 1, 1, 5])}
        return causal_conv(**named, activation="silu", output_final_state=True)

    assert torch.autograd.gradcheck(function, list(arguments.values()))
    assert torch.autograd.gradgradcheck(function, list(arguments.values()))


class Counter(TorchDispatchMode):
    """Counts the operations that run inside."""

    count = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        self.count += 1
        return f(*args, **(kwargs or {}))


def test_many_sequences_take_as_many_operations_as_two():
    counts = []
    for N in (2, 60):
        named = with_grad(inputs(B=1, T=60, N=N))
        with Counter() as counter:
            y, state = causal_conv(**named, cu_seqlens=torch.arange(0, 61, 60 // N), output_final_state=True)
            (y.sum() + state.sum()).backward()
        counts.append(counter.count)
    assert counts[0] == counts[1]


def test_bounds_on_a_device_are_not_read_by_the_host():
    """Tensors without data stand for those of a GPU: a host that wanted a number of them would fail."""
    arguments = {key: x.to("meta") for key, x in inputs(B=1, N=3).items()}
    bounds = torch.tensor([0, 4, 4, 11], device="meta")
    y, state = causal_conv(**arguments, cu_seqlens=bounds, output_final_state=True)
    assert y.shape == (1, 11, 3) and state.shape == (3, 3, 3)


def test_later_tokens_change_no_bit_of_an_earlier_output():
    arguments = inputs(dtype=torch.float32)
    y, _ = causal_conv(**arguments, activation="silu")
    changed = arguments["x"].clone()
    changed[:, 6:] = 100.0
    assert torch.equal(causal_conv(**arguments | {"x": changed}, activation="silu")[0][:, :6], y[:, :6])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_summed_in_float32_and_the_state_keeps_the_dtype(dtype):
    arguments = inputs(dtype=dtype)
    y, state = causal_conv(**arguments, activation="silu", output_final_state=True)
    expected = causal_conv(**{key: x.float() for key, x in arguments.items()}, activation="silu")[0]
    assert y.dtype == state.dtype == dtype
    assert torch.equal(y, expected.to(dtype))
    parameters = {key: arguments[key].float() for key in ("weight", "bias")}
    assert torch.equal(causal_conv(**arguments | parameters, activation="silu")[0], y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(causal_conv(**arguments, activation="silu")[0], y)


def test_the_state_is_a_copy_and_inputs_stay():
    arguments = inputs()
    before = [x.clone() for x in arguments.values()]
    state = causal_conv(**arguments, output_final_state=True)[1]
    assert state.untyped_storage().nbytes() == state.numel() * 8  # no view that keeps the whole sequence in memory
    state.zero_()
    assert all(torch.equal(x, y) for x, y in zip(arguments.values(), before))


@pytest.mark.parametrize(
    "error, change, message",
    [
        (ValueError, {"x": lambda x: x[0]}, "`x`: got shape [11, 3], expected [B, T, D]"),
        (ValueError, {"x": lambda x: x.mT}, "`weight`: got shape [3, 4], expected [D, W] with D = 11 as in `x`"),
        (ValueError, {"weight": lambda x: x[:, None]}, "`weight`: got shape [3, 1, 4], expected [D, W] with D = 3"),
        (ValueError, {"bias": lambda x: x[:2]}, "`bias`: got shape [2], expected [D] with D = 3"),
        (ValueError, {"initial_state": lambda x: x.mT[:, :2]}, "`initial_state`: got shape [2, 2, 3], expected [N, "),
        (ValueError, {"activation": "relu"}, "`activation`: got 'relu', expected None or 'silu'"),
        (ValueError, {"cu_seqlens": torch.tensor([0, 11])}, "`cu_seqlens`: got B = 2, expected B = 1"),
        (TypeError, {"weight": None}, "`weight`: got nothing (None), expected a tensor [D, W]"),
        (TypeError, {"output_final_state": 1}, "`output_final_state`: got int 1, expected True or False"),
        (TypeError, {"mask": 1}, "got the unknown argument `mask`"),
    ],
)
def test_bad_arguments_are_named(error, change, message):
    arguments = inputs()
    for key, new in change.items():
        arguments[key] = new(arguments[key]) if callable(new) else new
    with pytest.raises(error) as raised:
        causal_conv(**arguments)
    assert message in str(raised.value)


def test_bad_steps_are_named():
    x, weight, bias, state = inputs().values()
    with pytest.raises(ValueError, match=r"`x_t`: got shape \[2, 11, 3\], expected \[B, D\]"):
        short_conv.step(x, weight, state)
    with pytest.raises(ValueError, match=r"`state`: got shape \[2, 3, 2\], expected \[B, D, W-1\]"):
        short_conv.step(x[:, 0], weight, state[..., 1:])
    with pytest.raises(TypeError, match="got no argument `state`"):
        short_conv.step(x[:, 0], weight)
