"""Faults that users of other libraries reported for DeltaNet, Gated DeltaNet and KDA, asked of the forms here.

Other files ask the rest: a zero gate is no gate (report 5, flash-linear-attention#104, #463) in test_gated_deltanet.py,
gates of -20 (report 61, FlashKDA#7) in test_kda.py, resumed and packed sequences in test_forms.py.
"""

import pytest
import torch
from operators import CASES, inputs, with_gradients

from linattn_edu import l2norm

DELTA = ["deltanet", "gated_deltanet", "kda"]
GATED = ["gated_deltanet", "kda"]
FORMS = ["recurrent", "parallel", "chunkwise", "fused"]
TIGHT = dict(rtol=1e-10, atol=1e-10)


def run(name, form, a, **more):
    return getattr(CASES[name].module, form)(**a, output_final_state=True, **more)


def slopes(results, a):
    """Gradients of the weighted sum of the results for all arguments that require one."""
    draw = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=draw).to(x.dtype)).sum() for x in results)
    return torch.autograd.grad(loss, [x for x in a.values() if x.requires_grad])


@pytest.fixture
def poisoned_memory():
    """Memory that nothing has been written to yet holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gate", [-2.0, -50.0, -100.0, -1000.0, -1e4])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", GATED)
def test_strong_gates_are_finite_forward_and_backward(name, form, gate, dtype):
    """Reports 2, 3 and 4 (flash-linear-attention#99, #111, #122, transformers#48455): exp before the mask, then NaN."""
    a = with_gradients(inputs(name, T=128, H=4, dtype=dtype))
    a["g"] = torch.full_like(a["g"], gate).requires_grad_()
    o, S = run(name, form, a)
    assert all(x.isfinite().all() for x in (o, S, *slopes((o, S), a)))
    if gate <= -50:  # a token finds nothing of what was there before
        write = a["beta"][..., None] * a["v"]
        torch.testing.assert_close(o, 5**-0.5 * (a["q"] * a["k"]).sum(-1, keepdim=True) * write, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(S, a["k"][:, -1, :, :, None] * write[:, -1, :, None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("T", [1, 2, 7, 8, 15, 17, 63, 65, 79, 127])
@pytest.mark.parametrize("name", DELTA)
def test_any_length_forward_and_backward(name, T, poisoned_memory):
    """Reports 14 and 15 (flash-linear-attention#636, #88, #792): short sequences, and a last block that is not full."""
    results = {}
    for form in ("recurrent", "chunkwise"):
        a = with_gradients(inputs(name, T=T))
        results[form] = (*(out := run(name, form, a)), *slopes(out, a))
    for x, y in zip(results["chunkwise"], results["recurrent"], strict=True):
        torch.testing.assert_close(x, y, **TIGHT)


@pytest.mark.parametrize("K, V", [(48, 60), (60, 100), (100, 48), (153, 64), (128, 64), (64, 256), (128, 512), (24, 40)])
@pytest.mark.parametrize("name", DELTA)
def test_any_width(name, K, V, poisoned_memory):
    """Reports 16 to 18 (flash-linear-attention#1134, #1165, #1241, #589): widths odd, unequal or no power of two."""
    a = inputs(name, B=1, T=66, H=1, HV=1, K=K, V=V)
    for x, y in zip(run(name, "chunkwise", a), run(name, "recurrent", a)):
        torch.testing.assert_close(x, y, **TIGHT)


@pytest.mark.parametrize("name", DELTA)
def test_gradients_of_bfloat16_inputs(name):
    """Report 20 (flash-linear-attention#984, #988, #640): wrong dk, dbeta and dg at K = V = 128 in blocks of 64."""
    rounded = inputs(name, B=1, T=256, H=1, HV=1, K=128, V=128)
    rounded |= {key: rounded[key].bfloat16() for key in "qkv"}
    a, exact = with_gradients(rounded), with_gradients({key: x.double() for key, x in rounded.items()})
    got = slopes(run(name, "chunkwise", a), a)
    expected = slopes(run(name, "recurrent", exact), exact)
    for key, x, y in zip(a, got, expected):
        assert x.dtype == a[key].dtype
        assert (x.double() - y).square().mean().sqrt() < 0.01 * y.square().mean().sqrt()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DELTA)
def test_left_padding_leaves_no_trace(name, form):
    """Reports 32 and 33 (mamba#66, flash-linear-attention#967, pytorch#184575): zero rows, under l2norm too."""
    a = inputs(name, T=40)
    padded = with_gradients(
        {key: x if key == "initial_state" else torch.cat([0 * x[:, :5], x], 1) for key, x in a.items()}
    )
    normed = padded | {key: l2norm(padded[key]) for key in ("q", "k")}
    out = run(name, form, normed)
    gradients = dict(zip(padded, slopes(out, padded)))
    assert all(x.isfinite().all() for x in gradients.values())
    o, S = run(name, form, a | {key: l2norm(a[key]) for key in ("q", "k")})
    torch.testing.assert_close(out[0][:, 5:], o, **TIGHT)
    torch.testing.assert_close(out[1], S, **TIGHT)
    assert not gradients["v"][:, :5].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DELTA)
def test_gradient_of_the_initial_state(name, dtype):
    """Report 36 (flash-linear-attention#36, #37): wrong in bfloat16. It comes in the state's dtype, rounded once."""
    a = inputs(name, dtype=torch.float32)
    S = a["initial_state"].to(dtype)
    gradients = []
    for state in (S, S.double()):
        state = state.clone().requires_grad_()
        a = {key: x.to(torch.float64 if state.dtype == torch.float64 else torch.float32) for key, x in a.items()}
        run(name, "chunkwise", a | {"initial_state": state})[0].square().sum().backward()
        gradients.append(state.grad)
    assert gradients[0].dtype == dtype
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(gradients[0], gradients[1].to(dtype), rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DELTA)
def test_the_final_state_alone_has_a_gradient(name, form):
    """Report 37 (xma#445, mamba#101): the gradient of the final state was dropped."""
    expected = slopes_of_state(name, "recurrent")
    for key, slope in slopes_of_state(name, form).items():
        if key == "q":
            assert slope is None or not slope.any()  # the state does not depend on the queries
        else:
            assert slope.abs().max() > 1e-3
            torch.testing.assert_close(slope, expected[key], **TIGHT)


def slopes_of_state(name, form):
    a = with_gradients(inputs(name))
    weights = torch.randn(2, 4, 5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    S = run(name, form, a)[1]
    return dict(zip(a, torch.autograd.grad((S * weights).sum(), list(a.values()), allow_unused=True)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DELTA)
def test_row_i_of_the_state_belongs_to_key_channel_i(name, form):
    """Report 50 (vllm#40956, #41292): [K, V] taken for [V, K], which no shape shows where K = V."""
    a = inputs(name, "zero", B=1, T=1, H=1, HV=1, K=4, V=4, state=False)
    a["k"] = torch.tensor([0.0, 0, 1, 0], dtype=torch.float64).reshape(1, 1, 1, 4)
    a["beta"] = torch.ones_like(a["beta"])
    S = run(name, form, a)[1][0, 0]
    torch.testing.assert_close(S[2], a["v"].flatten(), **TIGHT)
    assert not S[[0, 1, 3]].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DELTA)
def test_the_state_of_float16_inputs_is_float32(name, form):
    """Report 53 (attention-gym#464): writes of 2^15, doubled, are beyond the largest float16."""
    a = inputs(name, "zero", B=1, T=8, H=1, HV=1, K=8, V=1, state=False)
    a |= {"k": torch.eye(8).reshape(1, 8, 1, 8), "v": torch.full((1, 8, 1, 1), 2.0**15)}
    a |= {"q": torch.ones(1, 8, 1, 8), "beta": torch.full((1, 8, 1), 2.0)}
    o, S = run(name, form, {key: x.half() for key, x in a.items()})
    assert S.dtype == torch.float32 and (S == 2.0**16).all()
    assert o.dtype == torch.float16
