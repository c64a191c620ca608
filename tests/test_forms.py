"""The theorems that every variant with the q, k, v signature obeys: all forms are one function."""

import inspect

import pytest
import torch
from operators import CASES, REGIMES_OF, inputs, leaves, numpy_recurrence, tensors, tree_map, with_gradients

from linattn_edu import forms

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


def run(name, form, arguments, **more):
    function = getattr(CASES[name].module, form.partition("-")[0])
    return function(**arguments, **FORMS[form], **{"output_final_state": True, **more})


def assert_equal(got, expected, **tolerance):
    for x, y in zip(leaves(got), leaves(expected), strict=True):
        torch.testing.assert_close(x, torch.as_tensor(y), **(tolerance or TIGHT))


def gradients(name, form, arguments, **more):
    arguments = with_gradients(arguments)
    o, state = run(name, form, arguments, **more)
    draw = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=draw, dtype=x.dtype)).sum() for x in [o, *leaves(state)])
    return torch.autograd.grad(loss, tensors(arguments))


def part(arguments, start, stop, state):
    """The arguments of tokens `start` to `stop`, from a given state."""
    cut = {
        key: x[:, start:stop] if isinstance(x, torch.Tensor) and key != "initial_state" else x
        for key, x in arguments.items()
    }
    return cut | {"initial_state": state}


def token(arguments, t):
    cut = {key: x[:, t] if isinstance(x, torch.Tensor) else x for key, x in arguments.items() if key != "initial_state"}
    return {{"q": "q_t", "k": "k_t", "v": "v_t"}.get(key, key): x for key, x in cut.items()}


@pytest.mark.parametrize("name, regime", REGIMES_OF)
def test_recurrent_is_the_numpy_recurrence(name, regime):
    for state in (True, False):
        arguments = inputs(name, regime, state=state)
        expected = numpy_recurrence(arguments, delta="beta" in CASES[name].gates)
        assert_equal(run(name, "recurrent", arguments)[0], expected[0])
        assert_equal(run(name, "recurrent", arguments)[1], expected[1])


@pytest.mark.parametrize("form", OTHERS)
@pytest.mark.parametrize("name, regime", REGIMES_OF)
def test_every_form_is_recurrent(name, regime, form):
    for T in (1, 16, 37, 70):
        arguments = inputs(name, regime, T=T)
        (o, state), (expected, last) = run(name, form, arguments), run(name, "recurrent", arguments)
        assert_equal(o, expected)
        assert_equal(state, last)


@pytest.mark.parametrize("form", OTHERS)
@pytest.mark.parametrize("name, regime", REGIMES_OF)
def test_every_gradient_is_that_of_recurrent(name, regime, form):
    arguments = inputs(name, regime)
    for got, expected in zip(gradients(name, form, arguments), gradients(name, "recurrent", arguments), strict=True):
        torch.testing.assert_close(got, expected, **TIGHT)


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise-16"])
@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name, form):
    arguments = inputs(name, B=1, T=18, H=1, HV=2, K=3, V=2)
    rest = {key: x for key, x in arguments.items() if key not in ("q", "k", "v", "initial_state", "g", "beta")}
    keys = [key for key in arguments if key not in rest and key != "initial_state"]
    state = leaves(arguments["initial_state"])

    def function(*xs):
        named = dict(zip(keys, xs)) | rest
        named["initial_state"] = xs[len(keys) :] if len(state) > 1 else xs[-1]
        o, last = run(name, form, named)
        return o, *leaves(last)

    xs = [x.requires_grad_() for x in [*(arguments[key] for key in keys), *state]]
    assert torch.autograd.gradcheck(function, xs, fast_mode=True)


@pytest.mark.parametrize("name", CASES)
def test_step_by_step_is_one_pass(name):
    arguments = inputs(name)
    o, last = run(name, "recurrent", arguments)
    step, state = CASES[name].module.step, arguments["initial_state"]
    for t in range(o.shape[1]):
        o_t, state = step(**token(arguments, t), state=state)
        assert_equal(o_t, o[:, t])
    assert_equal(state, last)


@pytest.mark.parametrize("name", CASES)
def test_step_in_place_overwrites_the_state(name):
    arguments = inputs(name)
    state = tree_map(torch.clone, arguments["initial_state"])
    step = CASES[name].module.step
    expected = step(**token(arguments, 0), state=state)
    o, new = step(**token(arguments, 0), state=state, inplace=True)
    assert new is state
    assert_equal(o, expected[0])
    assert_equal(state, expected[1])
    with pytest.raises(ValueError, match=r"`state(\[0\])?`: got dtype torch.float16, expected torch.float64"):
        step(**token(arguments, 0), state=tree_map(torch.Tensor.half, state), inplace=True)


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise-16"])
@pytest.mark.parametrize("name", CASES)
def test_split_and_resume_is_one_pass(name, form):
    arguments = inputs(name, T=70)
    o, last = run(name, "recurrent", arguments)
    for cut in (0, 1, 15, 16, 33, 69, 70):
        first, state = run(name, form, part(arguments, 0, cut, arguments["initial_state"]))
        second, state = run(name, form, part(arguments, cut, 70, state))
        assert_equal(torch.cat([first, second], 1), o)
        assert_equal(state, last)


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise-16", "fused"])
@pytest.mark.parametrize("name", CASES)
def test_packed_is_separate(name, form):
    bounds = torch.tensor([0, 0, 1, 20, 20, 70, 70])
    arguments = inputs(name, B=1, T=70, N=6)
    for dtype in (torch.int32, torch.int64):
        o, last = run(name, form, arguments, cu_seqlens=bounds.to(dtype))
        for n, (start, stop) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:])):
            state = tree_map(lambda x: x[n : n + 1], arguments["initial_state"])
            alone, alone_last = run(name, "recurrent", part(arguments, start, stop, state))
            assert_equal(o[:, start:stop], alone)
            assert_equal(tree_map(lambda x: x[n : n + 1], last), alone_last)


@pytest.mark.parametrize("form", ["parallel", "chunkwise-16"])
@pytest.mark.parametrize("name", CASES)
def test_packed_gradients_are_those_of_recurrent(name, form):
    bounds = torch.tensor([0, 0, 1, 20, 20, 37])
    arguments = inputs(name, B=1, N=5)
    packed = gradients(name, form, arguments, cu_seqlens=bounds)
    expected = gradients(name, "recurrent", arguments, cu_seqlens=bounds)
    for x, y in zip(packed, expected, strict=True):
        torch.testing.assert_close(x, y, **TIGHT)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_later_tokens_change_no_bit_of_an_earlier_output(name, form):
    arguments, other = (inputs(name, T=70, dtype=torch.float32, seed=seed) for seed in (0, 1))
    other["initial_state"] = arguments["initial_state"]
    o, _ = run(name, form, arguments)
    for cut in (1, 16, 40, 69):
        mixed = {
            key: torch.cat([x[:, :cut], other[key][:, cut:]], 1)
            if isinstance(x, torch.Tensor) and key != "initial_state"
            else x
            for key, x in arguments.items()
        }
        assert torch.equal(run(name, form, mixed)[0][:, :cut], o[:, :cut])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_a_sample_does_not_depend_on_its_batch(name, form):
    arguments = inputs(name, B=3, dtype=torch.float32)
    o, last = run(name, form, arguments)
    alone = {key: tree_map(lambda y: y[1:2] if isinstance(y, torch.Tensor) else y, x) for key, x in arguments.items()}
    o_1, last_1 = run(name, form, alone)
    assert_equal(o[1:2], o_1, rtol=1e-6, atol=1e-6 * o_1.abs().max().item())
    for x, y in zip(leaves(last), leaves(last_1)):
        torch.testing.assert_close(x[1:2], y, rtol=1e-6, atol=1e-6 * y.abs().max().item())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_two_runs_give_the_same_bits(name, form):
    arguments = inputs(name, dtype=torch.float32)
    for x, y in zip(gradients(name, form, arguments), gradients(name, form, arguments)):
        assert torch.equal(x, y)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_no_tokens_pass_the_state_through(name, form):
    arguments = inputs(name, T=0)
    o, last = run(name, form, arguments)
    assert o.shape == (2, 0, 4, 7) and o.dtype == torch.float64
    assert_equal(last, arguments["initial_state"])
    for x, y in zip(leaves(last), leaves(arguments["initial_state"])):
        assert x.data_ptr() != y.data_ptr()
    assert [x.shape for x in gradients(name, form, arguments)] == [x.shape for x in tensors(arguments)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_strides_do_not_matter_and_inputs_stay(name, form):
    arguments = inputs(name)
    strided = {
        key: tree_map(lambda y: y.repeat_interleave(2, -1)[..., ::2] if isinstance(y, torch.Tensor) else y, x)
        for key, x in arguments.items()
    }
    strided["v"] = strided["v"][:, :, :1].expand(-1, -1, 4, -1)
    plain = strided | {"v": strided["v"].contiguous()}
    before = [x.clone() for x in tensors(strided)]
    (o, last), (expected, expected_last) = run(name, form, strided), run(name, form, plain)
    assert_equal(o, expected)
    assert_equal(last, expected_last)
    assert all(torch.equal(x, y) for x, y in zip(tensors(strided), before))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_grouped_value_heads_read_their_query_head(name, form):
    arguments = inputs(name, H=2, HV=6)
    repeated = arguments | {key: arguments[key].repeat_interleave(3, 2) for key in ("q", "k")}
    (o, last), (expected, expected_last) = run(name, form, arguments), run(name, form, repeated)
    assert_equal(o, expected)
    assert_equal(last, expected_last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise-16"])
@pytest.mark.parametrize("name", CASES)
def test_low_precision_inputs_are_computed_in_float32(name, form, dtype):
    rounded = inputs(name)
    low = rounded | {key: rounded[key].to(dtype) for key in "qkv"}
    upcast = {key: tree_map(lambda y: y.float() if isinstance(y, torch.Tensor) else y, x) for key, x in low.items()}
    (o, last), (expected, expected_last) = run(name, form, low), run(name, form, upcast)
    assert o.dtype == dtype and all(x.dtype == torch.float32 for x in leaves(last))
    assert torch.equal(o, expected.to(dtype))
    assert all(torch.equal(x, y) for x, y in zip(leaves(last), leaves(expected_last)))


@pytest.mark.parametrize("name", CASES)
def test_autocast_does_not_lower_the_arithmetic(name):
    arguments = inputs(name, dtype=torch.float32)
    expected = run(name, "chunkwise", arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(name, "chunkwise", arguments)
        step = CASES[name].module.step(**token(arguments, 0), state=arguments["initial_state"])[0]
    assert torch.equal(got[0], expected[0])
    assert torch.equal(step, CASES[name].module.step(**token(arguments, 0), state=arguments["initial_state"])[0])


@pytest.mark.parametrize("form", ["recurrent", "chunkwise-16", "chunkwise-23", "fused"])
@pytest.mark.parametrize("name", CASES)
def test_segments_are_one_pass(name, form, monkeypatch):
    arguments = inputs(name, T=150)
    o, last = run(name, form, arguments)
    monkeypatch.setattr(forms, "SEGMENT", 32)
    assert_equal(run(name, form, arguments)[0], o)
    assert_equal(run(name, form, arguments)[1], last)


@pytest.mark.parametrize("name", CASES)
def test_scale_multiplies_the_output(name):
    arguments = inputs(name)
    if CASES[name].tuple_state:
        with pytest.raises(ValueError, match="`scale`: got 2.0, expected None: with `normalize` a scale cancels"):
            run(name, "recurrent", arguments, scale=2.0)
        return
    for form in FORMS:
        assert_equal(run(name, form, arguments, scale=3.0)[0], 3 * run(name, form, arguments, scale=1)[0])
        assert_equal(run(name, form, arguments)[0], run(name, form, arguments, scale=5**-0.5)[0])


@pytest.mark.parametrize("name", CASES)
def test_signatures_are_those_of_the_contract(name):
    module, gates = CASES[name].module, list(CASES[name].gates)
    options = ["feature_map", "normalize", "eps"] if CASES[name].variant == "linear" else []
    tail = ["scale", "initial_state", "output_final_state", "cu_seqlens"]
    for form in ("recurrent", "parallel", "chunkwise", "fused", "step"):
        parameters = list(inspect.signature(getattr(module, form)).parameters)
        if form == "step":
            assert parameters[: 5 + len(gates) + len(options)] == ["q_t", "k_t", "v_t", "state", *gates, *options, "scale"]
        else:
            expected = ["q", "k", "v", *gates, *options, *tail]
            assert parameters[: len(expected)] == expected
            assert ("chunk_size" in parameters) == (form in ("chunkwise", "fused"))
        for word in ("Args:", "Returns:", "Raises:", "Source:", "[B,"):
            assert word in getattr(module, form).__doc__


BAD = [
    (ValueError, {"q": lambda x: x[0]}, "`q`: got shape [37, 2, 5], expected [B, T, H, K]"),
    (ValueError, {"k": lambda x: x[..., :4]}, "`k`: got shape [2, 37, 2, 4], expected [B, T, H, K] with B = 2"),
    (ValueError, {"k": lambda x: x.transpose(1, 2)}, "heads before tokens ([B, H, T, ...]): transpose(1, 2)"),
    (ValueError, {"v": lambda x: x.transpose(1, 2)}, "`v`: got shape [2, 4, 37, 7], expected [B, T, HV, V] with B = 2"),
    (ValueError, {"v": lambda x: x[:, :, :3]}, "`v`: got HV = 3 heads, expected a multiple of H = 2"),
    (ValueError, {"v": lambda x: x[..., :0]}, "`v`: got shape [2, 37, 4, 0], expected V of at least 1"),
    (ValueError, {"v": lambda x: x.float()}, "`v`: got dtype torch.float32, expected torch.float64 as in `q`"),
    (ValueError, {"q": lambda x: x.long()}, "`q`: got dtype torch.int64, expected a floating dtype"),
    (ValueError, {"k": lambda x: x.to("meta")}, "`k`: got device meta, expected cpu as in `q`"),
    (ValueError, {"initial_state": lambda x: tree_map(lambda y: y[:1], x)}, "expected [N, HV, "),
    (ValueError, {"scale": float("nan")}, "`scale`: got nan, expected "),
    (ValueError, {"cu_seqlens": torch.tensor([0, 37])}, "`cu_seqlens`: got B = 2, expected B = 1"),
    (TypeError, {"q": None}, "`q`: got nothing (None), expected a tensor [B, T, H, K]"),
    (TypeError, {"v": lambda x: x.tolist()}, "`v`: got list "),
    (TypeError, {"initial_state": 3}, "`initial_state`: got int 3, expected "),
    (TypeError, {"output_final_state": 1}, "`output_final_state`: got int 1, expected True or False"),
    (TypeError, {"cu_seqlens": [0, 37]}, "`cu_seqlens`: got list [0, 37], expected an integer tensor [N+1]"),
    (TypeError, {"gk": 1}, "got the unknown argument `gk`, expected `q`, `k`, `v`"),
]


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise", "fused"])
@pytest.mark.parametrize("error, change, message", BAD)
@pytest.mark.parametrize("name", CASES)
def test_bad_arguments_are_named(name, error, change, message, form):
    arguments = inputs(name)
    for key, new in change.items():
        arguments[key] = new(arguments[key]) if callable(new) else new
    with pytest.raises(error) as raised:
        getattr(CASES[name].module, form)(**arguments)
    assert message in str(raised.value)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.gates])
def test_bad_gates_are_named(name):
    for gate, axes in CASES[name].gates.items():
        arguments = inputs(name)
        letters = "[B, T, " + ", ".join(axes.split()) + "]"
        for error, new, message in [
            (ValueError, arguments[gate].transpose(1, 2), f"expected {letters} with B = 2"),
            (ValueError, arguments[gate].transpose(1, 2), "heads before tokens"),
            (ValueError, arguments[gate][:, :-1], f"expected {letters} with B = 2"),
            (ValueError, arguments[gate].long(), f"`{gate}`: got dtype torch.int64, expected a floating dtype"),
            (TypeError, None, f"`{gate}`: got nothing (None), expected a tensor {letters}"),
            (TypeError, 0.5, f"`{gate}`: got float 0.5, expected a tensor {letters}"),
        ]:
            with pytest.raises(error) as raised:
                run(name, "chunkwise", arguments | {gate: new})
            assert message in str(raised.value) and f"`{gate}`" in str(raised.value)
        del arguments[gate]
        with pytest.raises(TypeError, match=f"got no argument `{gate}`"):
            run(name, "chunkwise", arguments)


@pytest.mark.parametrize("name", CASES)
def test_bad_calls_are_named(name):
    arguments = inputs(name, B=1)
    module = CASES[name].module
    for bounds, message in [
        ([1, 37], "[1, 37], expected positions that start at 0, never decrease and end at T = 37"),
        ([0, 36], "[0, 36], expected"),
        ([0, 20, 10, 37], "[0, 20, 10, 37], expected"),
        ([], "got shape [0], expected [N+1]"),
    ]:
        with pytest.raises(ValueError) as raised:
            module.recurrent(**arguments, cu_seqlens=torch.tensor(bounds, dtype=torch.int64))
        assert "`cu_seqlens`: " in str(raised.value) and message in str(raised.value)
    with pytest.raises(ValueError, match="`cu_seqlens`: got dtype torch.float32, expected torch.int32 or torch.int64"):
        module.recurrent(**arguments, cu_seqlens=torch.tensor([0.0, 37.0]))
    for size, error, message in [
        (0, ValueError, "got 0, expected a whole number of at least 1"),
        (1.5, TypeError, "got float 1.5, expected a whole number"),
        (True, TypeError, "got bool True, expected a whole number"),
    ]:
        with pytest.raises(error, match=f"`chunk_size`: {message}"):
            module.chunkwise(**arguments, chunk_size=size)
    with pytest.raises(TypeError, match="got no argument `v`"):
        module.recurrent(arguments["q"], arguments["k"])
    with pytest.raises(TypeError, match="got 4 positional arguments, expected 3"):
        module.recurrent(arguments["q"], arguments["k"], arguments["v"], arguments["v"])
    with pytest.raises(TypeError, match="got `q` twice"):
        module.recurrent(arguments["q"], **arguments)
    with pytest.raises(TypeError, match=r"`state`: got nothing \(None\), expected"):
        module.step(**token(arguments, 0), state=None)
    with pytest.raises(ValueError, match=r"`q_t`: got shape \[1, 37, 2, 5\], expected \[B, H, K\]"):
        module.step(**token(arguments, 0) | {"q_t": arguments["q"]}, state=arguments["initial_state"])
