"""Promises at the edges: no tokens, no sequences, unusual numbers, memory that results keep, messages in `step`."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from operators import CASES, inputs, leaves, tensors, tree_map, with_gradients
from test_forms import token

from linattn_edu import decay, gates, l2norm, linear, mamba, short_conv, softmax

FORMS = ("recurrent", "parallel", "chunkwise", "fused")


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def softmax_inputs(B=2, T=9):
    return {"q": draw(B, T, 4, 5), "k": draw(B, T, 2, 5), "v": draw(B, T, 2, 7)}


def mamba_inputs(B=2, T=9):
    u, x, A, D = draw(B, T, 4), draw(B, T, 3), -draw(4, 3).exp(), draw(4)
    return {"u": u, "delta": u.exp(), "A": A, "B": x, "C": x.cos(), "D": D, "initial_state": draw(B, 4, 3)}


MODULES = {name: case.module for name, case in CASES.items()} | {"softmax": softmax, "mamba": mamba}


def arguments_of(name, **sizes):
    return {"softmax": softmax_inputs, "mamba": mamba_inputs}.get(name, lambda **s: inputs(name, **s))(**sizes)


# Nothing to do.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODULES)
def test_of_no_tokens_the_output_has_a_gradient_of_every_input(name, form):
    for B in (0, 2):
        arguments = with_gradients(arguments_of(name, B=B, T=0))
        o, _ = getattr(MODULES[name], form)(**arguments)
        found = torch.autograd.grad(o.sum(), tensors(arguments))
        assert [x.shape for x in found] == [x.shape for x in tensors(arguments)]
        assert not any(x.any() for x in found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_no_sequences_have_no_states_and_a_gradient_of_every_input(name, form):
    arguments = with_gradients(inputs(name, B=1, T=0, N=0))
    bounds = torch.tensor([0])
    o, state = getattr(CASES[name].module, form)(**arguments, output_final_state=True, cu_seqlens=bounds)
    assert o.shape == (1, 0, 4, 7) and all(len(x) == 0 for x in leaves(state))
    torch.autograd.grad(o.sum() + sum(x.sum() for x in leaves(state)), tensors(arguments))


@pytest.mark.parametrize("T", [0, 1, 2])
def test_prefix_states_have_a_gradient_of_every_input(T):
    k, v, g = (x.requires_grad_() for x in (draw(2, T, 2, 3), draw(2, T, 4, 5), -draw(4).exp()))
    torch.autograd.grad(decay.prefix_states(k, v, g=g).sum(), [k, v, g])


@pytest.mark.parametrize("gate", [gates.gla_decay, gates.write_strength])
def test_gates_of_no_tokens_and_of_any_rank(gate):
    for shape in [(2, 0, 4, 5), (0, 3, 4), (3,), ()]:
        assert gate(torch.zeros(shape)).shape == shape


# Numbers that are numbers.


@pytest.mark.parametrize("form", ["chunkwise", "fused"])
@pytest.mark.parametrize("name", MODULES)
def test_a_chunk_size_may_be_any_whole_number(name, form):
    function, arguments = getattr(MODULES[name], form), arguments_of(name, T=37)
    expected = function(**arguments)[0]
    for size in (1, 37, 38, 2**31, 2**63, np.int64(16), np.uint8(200)):
        torch.testing.assert_close(function(**arguments, chunk_size=size)[0], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["softmax", "decay"])
def test_a_scale_may_be_any_finite_number(name, form):
    function, arguments = getattr(MODULES[name], form), arguments_of(name)
    expected = function(**arguments, scale=0.5)[0]
    for scale in (np.float32(0.5), np.float16(0.5), Fraction(1, 2)):
        assert torch.equal(function(**arguments, scale=scale)[0], expected)
    for scale in (10**400, -(10**400), np.float32("nan")):
        with pytest.raises(ValueError, match=r"`scale`: got [-\dn].*, expected a finite number"):
            function(**arguments, scale=scale)


def test_eps_is_at_least_zero():
    with pytest.raises(ValueError, match="`eps`: got -1, expected a number of at least 0"):
        linear.recurrent(**inputs("linear"), eps=-1)


def test_an_option_that_cannot_be_hashed_is_named():
    with pytest.raises(ValueError, match=r"`discretization`: got \['zoh'\], expected one of euler, zoh"):
        mamba.recurrent(**mamba_inputs(), discretization=["zoh"])
    with pytest.raises(ValueError, match=r"`activation`: got \['silu'\], expected None or 'silu'"):
        short_conv.causal_conv(draw(2, 9, 4), draw(4, 3), activation=["silu"])


# l2norm in half precision.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_l2norm_is_computed_in_float32(dtype):
    x = 300 * draw(50, 64).to(dtype)
    x[0] = 0
    assert torch.equal(l2norm(x), l2norm(x.float()).to(dtype))
    assert (l2norm(x)[1:].float().norm(dim=-1) - 1).abs().max() < 0.01


def test_l2norm_names_a_bad_argument():
    with pytest.raises(TypeError, match="`x`: got list .*, expected a tensor"):
        l2norm([1.0])
    with pytest.raises(ValueError, match="`x`: got dtype torch.int64, expected a floating dtype"):
        l2norm(torch.ones(3, dtype=torch.int64))


# What results keep.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODULES)
def test_outputs_are_contiguous_and_states_keep_no_larger_memory(name, form):
    for B in (1, 2):
        o, state = getattr(MODULES[name], form)(**arguments_of(name, B=B, T=64), output_final_state=True)
        assert o.is_contiguous()
        kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in leaves(state)}
        assert sum(kept.values()) == sum(x.nbytes for x in leaves(state))


def test_a_state_that_cannot_be_updated_in_place_is_left_alone():
    arguments = token(inputs("linear"), 0)
    S, z = inputs("linear")["initial_state"]
    before = S.clone()
    with pytest.raises(ValueError, match=r"`state\[1\]`: got dtype torch.float16, expected torch.float64"):
        linear.step(**arguments, state=(S, z.half()), inplace=True)
    assert torch.equal(S, before)


# Messages of `step` name its own arguments.


@pytest.mark.parametrize("name", MODULES)
def test_step_names_its_own_arguments(name):
    if name == "mamba":
        a = mamba_inputs()
        arguments = {f"{key}_t": a[key][:, 0] for key in ("u", "delta", "B", "C")} | {"A": a["A"]}
        state, first = a["initial_state"], "u_t"
    elif name == "softmax":
        a = softmax_inputs()
        arguments, state, first = token(a, 0), (a["k"], a["v"]), "q_t"
    else:
        arguments, state, first = token(inputs(name), 0), inputs(name)["initial_state"], "q_t"
    for change, expected in [(lambda x: x.to("meta"), "cpu"), (lambda x: x[:1], rf".* with B = 2|.* with N = 2")]:
        with pytest.raises(ValueError, match=rf"^`state(\[0\])?`: got .*, expected ({expected}).* as in `{first}`"):
            MODULES[name].step(**arguments, state=tree_map(change, state))
