"""The kernels in Triton's interpreter, in a process of their own: tests/test_kernels.py runs this file.

TRITON_INTERPRET counts only if it is set before Triton is first imported, and then for the whole process.
"""

import inspect
import weakref

import pytest
import torch
from operators import CASES, REGIMES_OF, inputs, leaves, tensors, tree_map, with_gradients
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from linattn_edu import decay, gla, kda, linear
from linattn_edu.kernels import additive, compile_all, config, mode
from linattn_edu.kernels.delta_backward import delta_intra_backward
from linattn_edu.kernels.launch import Launch
from linattn_edu.kernels.walk import walk

NAMES = list(CASES)


def test_the_interpreter_runs():
    assert mode() == "interpret"


def outputs_and_gradients(form, arguments, **more):
    arguments = with_gradients(arguments)
    o, state = form(**arguments, output_final_state=True, **more)
    draw = torch.Generator().manual_seed(1)
    outputs = [o, *leaves(state)]
    weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, tensors(arguments), weights)]


def assert_kernels_are_recurrent(name, arguments, tolerance=1e-5, **more):
    """fused in float32 against the recurrence in float64, relative to the largest entry of each tensor."""
    module = CASES[name].module
    low = {key: tree_map(lambda y: y.float() if torch.is_tensor(y) else y, x) for key, x in arguments.items()}
    expected = outputs_and_gradients(module.recurrent, arguments, **{k: x for k, x in more.items() if k != "chunk_size"})
    got = outputs_and_gradients(module.fused, low, backend="triton", **more)
    for x, y in zip(got, expected, strict=True):
        assert x.shape == y.shape and x.dtype == torch.float32
        assert (x - y).abs().max() <= tolerance * max(y.abs().max().item(), 1e-3)


@pytest.mark.parametrize("name, regime", REGIMES_OF)
def test_kernels_are_recurrent(name, regime):
    assert_kernels_are_recurrent(name, inputs(name, regime, B=1, T=70, H=1, HV=2, K=20, V=36))


@pytest.mark.parametrize("name", NAMES)
def test_short_chunks_and_sequences(name):
    for T in (1, 16, 37):
        assert_kernels_are_recurrent(name, inputs(name, B=1, T=T, H=1, HV=1, K=5, V=7), chunk_size=16)


@pytest.mark.parametrize("name", NAMES)
def test_grouped_heads_and_batches(name):
    assert_kernels_are_recurrent(name, inputs(name, B=2, T=20, H=2, HV=4), chunk_size=16)


@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences(name):
    bounds = torch.tensor([0, 0, 1, 20, 20, 50, 50], dtype=torch.int32)
    arguments = inputs(name, B=1, T=50, H=1, HV=2, N=6)
    assert_kernels_are_recurrent(name, arguments, chunk_size=16, cu_seqlens=bounds)


@pytest.mark.parametrize("name", ["linear-plain", "gated_deltanet", "kda"])
def test_several_tiles_of_channels(name):
    assert_kernels_are_recurrent(name, inputs(name, B=1, T=20, H=1, HV=1, K=150, V=140), chunk_size=16)


@pytest.mark.parametrize("name", [name for name in NAMES if "g" in CASES[name].gates])
def test_very_strong_gates(name):
    assert_kernels_are_recurrent(name, inputs(name, "very strong", B=1, T=37, H=1, HV=1))


@pytest.mark.parametrize("name", [name for name in NAMES if "g" in CASES[name].gates])
def test_a_reset_leaves_the_weak_gates_their_digits(name):
    arguments = inputs(name, "weak", B=1, T=37, H=1, HV=1)
    arguments["g"][:, 5] = -1e4
    assert_kernels_are_recurrent(name, arguments)


@pytest.mark.parametrize("name", [name for name in NAMES if "g" in CASES[name].gates])
def test_strong_gates_leave_their_gradient_its_digits(name):
    """Where e^-10 is left from token to token, a sum that takes away what it has added has lost the gradient."""
    arguments = inputs(name, "weak", B=1, T=37, H=1, HV=1)
    arguments["g"] = torch.full_like(arguments["g"], -10.0)
    assert_kernels_are_recurrent(name, arguments)


def test_strong_gates_leave_their_gradient_its_digits_where_operands_are_rounded():
    """PyTorch's chunkwise form with operands of 11 digits has an error of 4e-4 here, as large as with weak gates."""
    arguments = inputs("kda", "strong", B=1, T=64, H=1, HV=1, K=36, V=20)
    low = {key: x.half() if key in "qkv" else x.float() if torch.is_tensor(x) else x for key, x in arguments.items()}
    exact = {key: x.double() if torch.is_tensor(x) else x for key, x in low.items()}
    at = 2 + list(arguments).index("g")
    found = outputs_and_gradients(CASES["kda"].module.fused, low, backend="triton")[at]
    expected = outputs_and_gradients(CASES["kda"].module.recurrent, exact)[at]
    assert (found - expected).norm() <= 6e-4 * expected.norm()


@pytest.mark.parametrize("bounds", [None, [0, 0, 9, 37]])
@pytest.mark.parametrize("name", ["gated_deltanet", "kda"])
def test_in_one_chunk_the_gate_gradient_keeps_its_digits_whatever_states_are_kept_in(name, bounds, monkeypatch):
    """A GPU keeps them in bfloat16 between kernels, but what a sequence begins and ends with is given in float32.

    Tokens that write little and read nothing leave the gradient to the product of the two.
    """
    arguments = inputs(name, "weak", B=1, T=37, H=1, HV=2, K=20, V=36, N=bounds and len(bounds) - 1, dtype=torch.float32)
    arguments |= {"q": 0 * arguments["q"], "k": 1e-3 * arguments["k"]}
    packed = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}
    at = 2 + list(arguments).index("g")
    names, run, rounded = list(inspect.signature(delta_intra_backward.fn).parameters), Launch.__call__, []

    def rounding(launch, *args):
        if launch.kernel is delta_intra_backward:
            for kept in (args[names.index("states")], args[names.index("dstates")]):
                rounded.append(kept.copy_(kept.bfloat16()))
        return run(launch, *args)

    monkeypatch.setattr(Launch, "__call__", rounding)
    found = outputs_and_gradients(CASES[name].module.fused, arguments, backend="triton", **packed)[at]
    double = {key: x.double() if torch.is_tensor(x) else x for key, x in arguments.items()}
    expected = outputs_and_gradients(CASES[name].module.recurrent, double, **packed)[at]
    assert len(rounded) == 2
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("gate", ["decay", "gla"])
def test_the_gate_gradient_of_additive_rules_meets_states_in_float32(gate, monkeypatch):
    """With bfloat16 inputs on a GPU, whose plans are made here."""
    found = []

    def look(launch, *args):
        if launch.kernel is walk:
            states = dict(zip(inspect.signature(walk.fn).parameters, args))["states"]
            found.extend([] if states is None else [states.dtype])

    monkeypatch.setattr(Launch, "__call__", look)
    monkeypatch.setattr(config, "capability_of", lambda _: (9, 0))
    additive.cached_plan.cache_clear()
    a = inputs(gate, B=1, T=37, H=1, HV=1, dtype=torch.float32)
    q, k, v = (a[name].bfloat16() for name in "qkv")
    options = None, None, None, 1.0, 64
    o, _, kept = additive.run_forward(q, k, v, a["g"], *options, True, False, torch.bfloat16)
    additive.run_backward(o, None, q, k, v, a["g"], None, None, None, kept, 1.0, 64)
    additive.cached_plan.cache_clear()
    assert found == [torch.float32] * 2


@pytest.mark.parametrize("name", [name for name in NAMES if "beta" in CASES[name].gates])
def test_reflections_and_like_keys(name):
    arguments = inputs(name, B=1, T=70, H=1, HV=1, beta_max=2.0)
    arguments["k"] = torch.nn.functional.normalize(arguments["k"][:, :1] + 0.3 * arguments["k"], dim=-1)
    assert_kernels_are_recurrent(name, arguments, tolerance=1e-4)


@pytest.mark.parametrize("name", ["linear-plain", "decay", "gla"])
def test_segments_change_no_result(name, monkeypatch):
    arguments = inputs(name, B=1, T=90, H=1, HV=2, dtype=torch.float32)
    found = []
    for multiprocessors in (1, 64):
        monkeypatch.setattr(additive, "multiprocessors", lambda _, n=multiprocessors: n)
        additive.cached_plan.cache_clear()
        found.append(outputs_and_gradients(CASES[name].module.fused, arguments, chunk_size=16))
        g = arguments.get("g")
        found[-1].append(additive.plan(arguments["q"], arguments["v"], g, None, 16, False).NS)
    additive.cached_plan.cache_clear()
    *one, NS_one = found[0]
    *several, NS = found[1]
    assert NS_one == 1 and NS == 3
    for x, y in zip(one, several, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["linear-plain", "decay", "gla"])
def test_a_scale_of_zero_leaves_the_gradients_of_the_state(name):
    assert_kernels_are_recurrent(name, inputs(name, B=1, T=20, H=1, HV=1) | {"scale": 0.0}, chunk_size=16)


def test_one_constant_gate_a_head():
    arguments = inputs("decay", B=1, T=37)
    arguments["g"] = decay.retnet_log_decay(4, dtype=torch.float64)
    assert_kernels_are_recurrent("decay", arguments)


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_give_the_same_bits(name):
    arguments = inputs(name, dtype=torch.float32, B=1)
    first, second = (outputs_and_gradients(CASES[name].module.fused, arguments) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second))


@pytest.mark.parametrize("name", NAMES)
def test_low_precision_and_strides(name):
    arguments = inputs(name, B=1, T=20)
    for dtype in (torch.float16, torch.bfloat16):
        low = {key: x.to(dtype) if key in "qkv" else x for key, x in arguments.items()}
        low["q"] = low["q"].repeat_interleave(2, -1)[..., ::2]
        o, state = CASES[name].module.fused(**low, output_final_state=True, backend="triton")
        exact, last = CASES[name].module.recurrent(**low, output_final_state=True)
        assert o.dtype == dtype and all(x.dtype == torch.float32 for x in leaves(state))
        torch.testing.assert_close(o, exact, rtol=1e-2, atol=1e-2 * exact.abs().max().item())
        digits = 1e-2 if dtype == torch.bfloat16 else 1e-3  # operands of 8 and of 11 binary digits: bfloat16, TF32
        for x, y in zip(leaves(state), leaves(last)):
            torch.testing.assert_close(x, y.float(), rtol=digits, atol=digits * y.abs().max().item())


@pytest.mark.parametrize("name", ["linear", "decay", "kda"])
def test_torch_compile_takes_the_kernels_whole(name):
    arguments = inputs(name, B=1, T=20, H=1, HV=2, dtype=torch.float32)
    module = CASES[name].module

    def fused(**arguments):
        return module.fused(**arguments, output_final_state=True, backend="triton")

    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    for x, y in zip(outputs(compiled, arguments), outputs(fused, arguments), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("backward", [False, True])
def test_only_for_a_backward_pass_does_gla_keep_its_running_sums(backward, monkeypatch):
    """They are its largest array; without them o takes their memory, and a forward pass needs less than FLA's."""
    arguments = inputs("gla", B=1, T=20, H=1, HV=1, dtype=torch.float32)
    made, there = [], []

    class Watched(additive.Plan):
        def empty(self, *shape, dtype=torch.float32):
            x = super().empty(*shape, dtype=dtype)
            if dtype == self.whole:
                made.append(weakref.ref(x))
            return x

    go = additive.go
    monkeypatch.setattr(additive, "cached_plan", Watched)
    monkeypatch.setattr(additive, "go", lambda *a, **options: there.append(made[0]() is not None) or go(*a, **options))
    with torch.set_grad_enabled(backward):
        gla.fused(**with_gradients(arguments), backend="triton")
    assert len(made) == 1 and there and set(there) == {backward}


def outputs(function, arguments):
    arguments = with_gradients(arguments)
    o, state = function(**arguments)
    loss = sum(x.square().sum() for x in [o, *leaves(state)])
    return [o, *leaves(state), *torch.autograd.grad(loss, tensors(arguments))]


def test_float64_and_sizes_beyond_the_kernels_are_refused_with_advice():
    with pytest.raises(ValueError, match="`backend`: got 'triton', but float64 is computed in PyTorch: backend='torch'"):
        decay.fused(**inputs("decay"), backend="triton")
    wide = inputs("decay", B=1, T=3, H=1, HV=1, K=257, dtype=torch.float32)
    with pytest.raises(ValueError, match="the kernels serve K <= 256 and V <= 512 here, got K = 257"):
        decay.fused(**wide, backend="triton")
    assert torch.equal(decay.fused(**wide)[0], decay.chunkwise(**wide)[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_second_derivative_is_refused_and_not_dropped(name):
    """At once: where the input asked for has a way of its own to the loss too, a missing part would not be noticed."""
    a = with_gradients({key: x.float() if torch.is_tensor(x) else x for key, x in inputs(name, B=1, T=5, state=False).items()})
    o, _ = CASES[name].module.fused(**a, backend="triton")
    with pytest.raises(RuntimeError, match="gradients have no graph .* backend='torch'"):
        torch.autograd.grad(o.square().sum(), a["q"], create_graph=True)


def test_a_checkpointed_gradient_is_the_gradient():
    a = with_gradients({key: x.float() for key, x in inputs("gla", B=1, T=5, state=False).items()})
    expected = torch.autograd.grad(gla.fused(**a)[0].square().sum(), tensors(a))
    for reentrant in (True, False):
        o = checkpoint(lambda q, k, v, g: gla.fused(q, k, v, g=g)[0], *tensors(a), use_reentrant=reentrant)
        o.square().sum().backward()
        for x, dx in zip(tensors(a), expected, strict=True):
            assert torch.equal(x.grad, dx)
            x.grad = None


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own, in forward mode
@pytest.mark.parametrize("name", NAMES)
def test_forward_derivatives_are_those_of_the_formulas(name):
    a = {key: x.float() if torch.is_tensor(x) else x for key, x in inputs(name, B=1, T=5, state=False).items()}
    module, direction = CASES[name].module, torch.ones_like(a["v"])
    with forward_ad.dual_level():
        a["v"] = forward_ad.make_dual(a["v"], direction)
        found, expected = (forward_ad.unpack_dual(f(**a)[0]).tangent for f in (module.fused, module.chunkwise))
        assert expected.norm() > 0 and torch.equal(found, expected)
        with pytest.raises(ValueError, match="got 'triton', but torch.func and forward-mode derivatives need the formulas"):
            module.fused(**a, backend="triton")


def test_torch_func_takes_the_formulas_and_leaves_the_kernels_to_the_next_call():
    a = {key: x.float() for key, x in inputs("kda", B=2, T=5, state=False).items()}
    each = torch.func.vmap(lambda x: kda.fused(**{key: y[None] for key, y in x.items()})[0][0])
    torch.testing.assert_close(each(a), kda.chunkwise(**a)[0])
    kda.fused(**a, backend="triton")


def test_a_map_with_weights_gets_the_dtype_of_its_weights():
    phi = torch.nn.Linear(5, 6)
    a = inputs("linear", state=False)
    q, k, v = a["q"], a["k"], a["v"]
    for form in (linear.fused, linear.chunkwise):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            o, _ = form(q.to(dtype), k.to(dtype), v.to(dtype), feature_map=phi.to(dtype))
            assert o.dtype == dtype and o.isfinite().all()
    double = torch.nn.Linear(5, 6).double()
    assert linear.fused(q, k, v, feature_map=lambda x: double(x))[0].dtype == torch.float64


def test_a_map_with_weights_in_whole_numbers_gets_x_as_it_is():
    class Quantised(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.arange(-15, 15, dtype=torch.int8).view(6, 5), requires_grad=False)
            self.step = torch.nn.Parameter(torch.tensor(0.1))

        def forward(self, x):
            return (x @ (self.step * self.weight).T).exp()

    a = {key: x.float() for key, x in inputs("linear", state=False).items() if key in "qkv"}
    phi = Quantised()
    assert torch.equal(linear.chunkwise(**a, feature_map=phi)[0], linear.chunkwise(**a, feature_map=lambda x: phi(x))[0])


def test_tensors_without_data_do_not_meet_the_interpreter():
    x = torch.empty(1, 5, 2, 4, device="meta")
    o, S = decay.fused(x, x, x, g=torch.empty(1, 5, 2, device="meta"), output_final_state=True)
    assert o.shape == x.shape and S.shape == (1, 2, 4, 4) and o.is_meta


def test_under_the_interpreter_nothing_is_compiled_and_the_call_says_so():
    with pytest.raises(RuntimeError, match="under TRITON_INTERPRET=1 nothing is compiled: restart Python without it"):
        compile_all((8, 0))
