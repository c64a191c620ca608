"""The step kernel in Triton's interpreter, in a process of its own: tests/test_step_kernel.py runs this file."""

import gc
import weakref

import pytest
import torch
from operators import CASES, REGIMES_OF, inputs, leaves, tree_map
from torch.autograd import forward_ad

from linattn_edu import kda, linear
from linattn_edu.kernels import mode

NAMES = list(CASES)


def test_the_interpreter_runs():
    assert mode() == "interpret"


def single(arguments):
    return {key: tree_map(lambda y: y.float() if torch.is_tensor(y) else y, x) for key, x in arguments.items()}


def token(arguments, t):
    """The arguments of `step` at token t, but for the state."""
    a = {key: x for key, x in arguments.items() if key != "initial_state"}
    return {f"{key}_t" if key in "qkv" else key: x[:, t] if torch.is_tensor(x) else x for key, x in a.items()}


def assert_equal(got, expected, digits=2e-6):
    if isinstance(expected, tuple):
        for x, y in zip(got, expected, strict=True):
            assert_equal(x, y, digits)
    else:
        assert got.shape == expected.shape
        assert (got - expected).abs().max() <= digits * max(expected.abs().max().item(), 1e-3)


def assert_steps_are_recurrent(name, arguments, inplace=False, digits=2e-6):
    """The kernel in float32, token by token, against the recurrence in float64."""
    module, low = CASES[name].module, single(arguments)
    o, last = module.recurrent(**arguments, output_final_state=True)
    state = tree_map(torch.clone, low["initial_state"])
    for t in range(o.shape[1]):
        before, old = state, tree_map(torch.clone, state)
        o_t, state = module.step(**token(low, t), state=state, backend="triton", inplace=inplace)
        assert_equal(o_t, o[:, t], digits)
        if inplace:
            assert state is before
        else:
            assert all(torch.equal(x, y) for x, y in zip(leaves(before), leaves(old)))
    assert_equal(state, last, digits)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name, regime", REGIMES_OF)
def test_steps_are_recurrent(name, regime, inplace):
    assert_steps_are_recurrent(name, inputs(name, regime, T=3, K=20, V=36), inplace)


@pytest.mark.parametrize("name", ["linear", "linear-softmax-map", "decay", "kda"])
def test_several_tiles_of_channels(name):
    for K, V in ((150, 70), (3, 300)):
        assert_steps_are_recurrent(name, inputs(name, B=1, T=2, H=1, HV=2, K=K, V=V), inplace=True)


@pytest.mark.parametrize("phi", ["relu", "relu2", "exp", "identity", torch.nn.Softplus()])
def test_every_feature_map(phi):
    arguments = inputs("linear", T=2, K=9) | {"feature_map": phi}
    arguments |= {"q": arguments["q"].abs(), "k": arguments["k"].abs()}
    assert_steps_are_recurrent("linear", arguments)


@pytest.mark.parametrize("name", ["decay", "gla", "gated_deltanet", "kda"])
def test_very_strong_gates(name):
    assert_steps_are_recurrent(name, inputs(name, "very strong", T=2))


@pytest.mark.parametrize("name", ["deltanet", "kda"])
def test_reflections(name):
    assert_steps_are_recurrent(name, inputs(name, T=3, beta_max=2.0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_prefill_then_steps_is_one_pass(name, inplace):
    module, a = CASES[name].module, single(inputs(name, T=8))
    expected, last = module.recurrent(**a, output_final_state=True)
    prefix = {key: x[:, :5] if torch.is_tensor(x) and key != "initial_state" else x for key, x in a.items()}
    _, state = module.chunkwise(**prefix, output_final_state=True)
    first = leaves(state)
    for t in range(5, 8):
        o, state = module.step(**token(a, t), state=state, inplace=inplace, backend="triton")
        assert_equal(o, expected[:, t], 1e-5)
    assert_equal(state, last, 1e-5)
    assert ([x.data_ptr() for x in first] == [x.data_ptr() for x in leaves(state)]) == inplace


@pytest.mark.parametrize("name", ["linear", "gated_deltanet"])
def test_strides(name):
    """Slices of one projection, a state that is expanded, and one whose axes were swapped."""
    module, a = CASES[name].module, single(inputs(name, T=2, H=4))
    x = token(a, 0)
    fused = torch.cat([x["q_t"], x["k_t"], x["v_t"]], -1)
    slices = dict(zip(("q_t", "k_t", "v_t"), fused.split([x["q_t"].shape[-1]] * 2 + [x["v_t"].shape[-1]], -1)))
    expected = module.step(**x, state=a["initial_state"], backend="torch")
    swapped = tree_map(lambda y: y.transpose(0, 1).contiguous().transpose(0, 1), a["initial_state"])
    for got in (module.step(**x | slices, state=a["initial_state"]), module.step(**x, state=swapped)):
        assert_equal(got, expected)
    o, state = module.step(**x, state=swapped, inplace=True)
    assert state is swapped
    assert_equal((o, state), expected)
    broad = tree_map(lambda y: y[:1, :1].expand_as(y), a["initial_state"])
    assert_equal(module.step(**x, state=broad), module.step(**x, state=broad, backend="torch"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_low_precision_is_rounded_at_the_end_alone(name, dtype):
    module, x = CASES[name].module, token(single(inputs(name, T=1)), 0)
    x = {key: y.to(dtype) if torch.is_tensor(y) else y for key, y in x.items()}
    state = tree_map(lambda y: y.to(dtype), inputs(name)["initial_state"])
    o, new = module.step(**x, state=state, backend="triton")
    expected, last = module.step(**x, state=state, backend="torch")
    assert o.dtype == dtype and all(y.dtype == torch.float32 for y in leaves(new))
    torch.testing.assert_close(o, expected)
    assert_equal(new, last)
    with pytest.raises(ValueError, match=r"`state.*`: got dtype .*, expected torch.float32 to be updated in place"):
        module.step(**x, state=state, inplace=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_wanted_gradient_keeps_its_graph(name):
    module, a = CASES[name].module, single(inputs(name, T=1))
    x = token(a, 0) | {"v_t": a["v"][:, 0].requires_grad_()}
    o, _ = module.step(**x, state=a["initial_state"])
    assert o.requires_grad
    with pytest.raises(ValueError, match="`backend`: got 'triton', but a gradient is wanted: step under torch.no_grad()"):
        module.step(**x, state=a["initial_state"], backend="triton")
    with torch.no_grad():
        assert not module.step(**x, state=a["initial_state"], backend="triton")[0].requires_grad


def test_autograd_sees_that_a_state_was_overwritten():
    a = single(inputs("kda", T=1))
    weight = torch.ones(1, requires_grad=True)
    loss = (weight * a["initial_state"]).sum()
    kda.step(**token(a, 0), state=a["initial_state"], inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", ["linear", "decay", "kda"])
def test_torch_compile_takes_the_step_whole(name, inplace):
    module, a = CASES[name].module, single(inputs(name, T=1))

    def step(state, **x):
        return module.step(**x, state=state, inplace=inplace, backend="triton")

    state = tree_map(torch.clone, a["initial_state"])
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected = step(tree_map(torch.clone, a["initial_state"]), **token(a, 0))
    assert_equal(compiled(state, **token(a, 0)), expected)
    assert_equal(state, expected[1] if inplace else a["initial_state"])


def test_no_tokens_and_float64():
    a = inputs("linear", B=0, T=1)
    o, _ = linear.step(**token(single(a), 0), state=single(a)["initial_state"])
    assert o.shape == (0, 4, 7)
    a = inputs("linear", T=1)
    with pytest.raises(ValueError, match="`backend`: got 'triton', but float64 is computed in PyTorch"):
        linear.step(**token(a, 0), state=a["initial_state"], backend="triton")
    assert linear.step(**token(a, 0), state=a["initial_state"])[0].dtype == torch.float64


def test_a_feature_map_with_weights_keeps_its_gradient():
    """Though no tensor of the call wants one."""
    phi = torch.nn.Linear(5, 6)
    x = token({key: y for key, y in single(inputs("linear", T=1)).items() if key != "initial_state"}, 0)
    more = {"state": (torch.rand(2, 4, 6, 7), torch.rand(2, 4, 6)), "feature_map": phi}
    found, expected = (
        torch.autograd.grad(linear.step(**x, **more, backend=backend)[0].sum(), phi.weight)[0] for backend in (None, "torch")
    )
    assert expected.norm() > 0 and torch.equal(found, expected)
    with pytest.raises(ValueError, match="but a gradient is wanted"):
        linear.step(**x, **more, backend="triton")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own, in forward mode
def test_forward_derivatives_are_those_of_the_formulas():
    a = single(inputs("kda", T=1))
    with forward_ad.dual_level():
        S = forward_ad.make_dual(a["initial_state"], torch.ones_like(a["initial_state"]))
        found, expected = (kda.step(**token(a, 0), state=S, backend=backend) for backend in (None, "torch"))
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(forward_ad.unpack_dual(x).tangent, forward_ad.unpack_dual(y).tangent)
    kda.step(**token(a, 0), state=a["initial_state"], backend="triton")


def test_no_map_of_a_caller_is_kept_alive():
    phi = torch.nn.Linear(5, 6).requires_grad_(False)
    x, alive = token(single(inputs("linear", T=1)), 0), weakref.ref(phi)
    linear.step(**x, state=(torch.rand(2, 4, 6, 7), torch.rand(2, 4, 6)), feature_map=phi)
    del phi
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("wanted", [False, True])
def test_a_map_is_asked_for_features_once(wanted):
    """Not for the kernel and then again for the formulas, where a gradient is wanted."""
    x, seen = token(single(inputs("linear", T=1)), 0), []

    def watched(y):
        seen.append(y.shape)
        return y.exp()

    x["v_t"].requires_grad_(wanted)
    linear.step(**x, state=(torch.rand(2, 4, 5, 7), torch.rand(2, 4, 5)), feature_map=watched)
    assert seen.count(x["q_t"].shape) == 2  # for q and k


def test_the_plan_of_a_map_that_holds_nothing_is_kept():
    x, state = token(single(inputs("linear", T=1)), 0), (torch.rand(2, 4, 5, 7), torch.rand(2, 4, 5))
    held = torch.ones(5)
    linear.operator.plans.clear()
    for feature_map, kept in ((lambda y: y.exp() * held, 0), (lambda y: y.exp(), 1)):
        linear.step(**x, state=state, feature_map=feature_map)
        assert len(linear.operator.plans) == kept
