"""What is true of linear attention alone: the normaliser, the feature maps, the bidirectional form."""

import numpy as np
import pytest
import torch
from operators import inputs

from linattn_edu import linear, softmax
from linattn_edu.feature_maps import FEATURE_MAPS, elu1

TIGHT = dict(rtol=1e-10, atol=1e-10)


def test_rows_of_weights_sum_to_one():
    arguments = inputs("linear", state=False)
    arguments["v"] = torch.ones_like(arguments["v"])
    for form in (linear.recurrent, linear.parallel, linear.chunkwise, linear.bidirectional):
        torch.testing.assert_close(form(**arguments, eps=0.0)[0], arguments["v"], **TIGHT)


def test_causal_outputs_are_the_masked_sum_and_not_the_bidirectional_one():
    q, k, v = (inputs("linear", state=False, HV=2)[name] for name in "qkv")
    weights = torch.einsum("bthk,bshk->bhts", elu1(q), elu1(k))
    masked = weights.tril()
    causal = torch.einsum("bhts,bshv->bthv", masked / masked.sum(-1, keepdim=True), v)
    every = torch.einsum("bhts,bshv->bthv", weights / weights.sum(-1, keepdim=True), v)
    torch.testing.assert_close(linear.parallel(q, k, v, eps=0.0)[0], causal, **TIGHT)
    torch.testing.assert_close(linear.bidirectional(q, k, v, eps=0.0)[0], every, **TIGHT)
    torch.testing.assert_close(every[:, -1], causal[:, -1], **TIGHT)
    assert ((every - causal)[:, :-1].abs().amax((0, 2, 3)) > 1e-3).all()


def test_bidirectional_ignores_order_and_leaks_the_future():
    q, k, v = (inputs("linear", state=False)[name] for name in "qkv")
    order = torch.randperm(37, generator=torch.Generator().manual_seed(0))
    o, none = linear.bidirectional(q, k, v)
    assert none is None
    torch.testing.assert_close(linear.bidirectional(q, k[:, order], v[:, order])[0], o, **TIGHT)
    later = v.clone()
    later[:, -1] += 1
    assert (linear.bidirectional(q, k, later)[0][:, 0] - o[:, 0]).abs().min() > 1e-4
    assert torch.equal(linear.parallel(q, k, later)[0][:, :-1], linear.parallel(q, k, v)[0][:, :-1])


@pytest.mark.parametrize("normalize", [True, False])
def test_bidirectional_gradcheck(normalize):
    xs = [inputs("linear", T=9, B=1, H=1, HV=2, K=3, V=2, state=False)[name].requires_grad_() for name in "qkv"]
    assert torch.autograd.gradcheck(lambda q, k, v: linear.bidirectional(q, k, v, normalize=normalize)[0], xs)


def test_the_state_is_the_sum_of_outer_products_and_of_features():
    arguments = inputs("linear", state=False, HV=2)
    _, (S, z) = linear.chunkwise(**arguments, output_final_state=True)
    features = elu1(arguments["k"])
    torch.testing.assert_close(S, torch.einsum("bthk,bthv->bhkv", features, arguments["v"]), **TIGHT)
    torch.testing.assert_close(z, features.sum(1), **TIGHT)


def test_an_additive_state_forgets_the_order_of_the_past():
    q, k, v = (inputs("linear", state=False)[name] for name in "qkv")
    order = torch.cat([torch.randperm(36, generator=torch.Generator().manual_seed(0)), torch.tensor([36])])
    last = linear.recurrent(q, k, v)[0][:, -1]
    torch.testing.assert_close(linear.recurrent(q, k[:, order], v[:, order])[0][:, -1], last, **TIGHT)


def test_the_causal_mask_breaks_low_rank():
    draw = torch.Generator().manual_seed(0)
    q, k = (elu1(torch.randn(64, 8, generator=draw, dtype=torch.float64)) for _ in range(2))
    assert torch.linalg.matrix_rank(q @ k.T) == 8
    assert torch.linalg.matrix_rank((q @ k.T).tril()) == 64


def test_positive_features_leave_the_sum_of_exponentials():
    """sum_i e^(q_i + k_i) is not e^(q^T k): the map `exp` gives another kernel than softmax's."""
    q, k, v = (inputs("linear", state=False, HV=2)[name] for name in "qkv")
    with_map, _ = linear.parallel(q, k, v, feature_map="exp")
    assert (with_map - softmax.parallel(q, k, v, scale=1.0)[0]).abs().max() > 0.1


@pytest.mark.parametrize("name, formula", [
    ("elu1", lambda x: np.where(x > 0, 1 + x, np.exp(np.minimum(x, 0)))),
    ("relu", lambda x: np.maximum(x, 0)),
    ("relu2", lambda x: np.maximum(x, 0) ** 2),
    ("exp", np.exp),
    ("softmax", lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)),
    ("identity", lambda x: x),
])
def test_feature_maps_are_their_formulas(name, formula):
    x = 3 * torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(FEATURE_MAPS[name](x), torch.from_numpy(formula(x.numpy())), **TIGHT)
    assert torch.autograd.gradcheck(FEATURE_MAPS[name], [x.requires_grad_()])


def test_elu1_is_positive_where_the_naive_sum_rounds_to_zero():
    x = torch.tensor([-20.0, -80.0])
    assert (torch.nn.functional.elu(x) + 1 == 0).all()
    torch.testing.assert_close(elu1(x), x.exp())
    x = torch.tensor([-1e30, 1e30, 0.0], requires_grad=True)
    (slope,) = torch.autograd.grad(elu1(x).sum(), x)
    assert torch.equal(slope, torch.tensor([0.0, 1.0, 1.0]))


@pytest.mark.parametrize("normalize", [True, False])
def test_a_callable_may_change_the_width_and_learn(normalize):
    layer = torch.nn.Linear(5, 12, dtype=torch.float64)
    arguments = inputs("linear", state=False) | {"feature_map": lambda x: layer(x).exp(), "normalize": normalize}
    o, state = linear.recurrent(**arguments, output_final_state=True)
    assert (state[0] if normalize else state).shape == (2, 4, 12, 7)
    for form in (linear.parallel, linear.chunkwise, linear.fused):
        again, last = form(**arguments, initial_state=state, output_final_state=True)
        expected, expected_last = linear.recurrent(**arguments, initial_state=state, output_final_state=True)
        torch.testing.assert_close(again, expected, **TIGHT)
        torch.testing.assert_close(last, expected_last, **TIGHT)
    assert torch.autograd.grad(o.sum(), layer.weight)[0].abs().max() > 0
    scale = 1 if normalize else 5**-0.5
    x = [inputs("linear", state=False)[name] for name in "qkv"]
    by_hand = linear.recurrent(*(layer(y).exp() for y in x[:2]), x[2], feature_map="identity", normalize=normalize,
                               **({} if normalize else {"scale": scale}))[0]
    torch.testing.assert_close(o, by_hand, **TIGHT)


def test_bad_options_are_named():
    arguments = inputs("linear", state=False)
    for error, change, message in [
        (ValueError, {"feature_map": "elu"}, "`feature_map`: got 'elu', expected a callable or one of elu1, relu, "),
        (TypeError, {"feature_map": 3}, "`feature_map`: got int 3, expected a callable or one of elu1"),
        (ValueError, {"feature_map": lambda x: x.sum(1)}, "`feature_map`: got a tensor of shape "),
        (ValueError, {"feature_map": lambda x: None}, "`feature_map`: got nothing (None) for a `k` of shape "),
        (TypeError, {"normalize": "yes"}, "`normalize`: got str 'yes', expected True or False"),
        (TypeError, {"eps": None}, "`eps`: got nothing (None), expected a number"),
        (ValueError, {"eps": float("nan")}, "`eps`: got nan, expected a finite number"),
        (TypeError, {"initial_state": torch.zeros(2, 4, 5, 7)}, "expected the tuple (S, z)"),
        (ValueError, {"initial_state": (torch.zeros(2, 4, 5, 7), torch.zeros(2, 4, 6))},
         "`initial_state[1]`: got shape [2, 4, 6], expected [N, HV, D] with N = 2 as in `q`, HV = 4 as in `v`"),
    ]:
        for form in (linear.recurrent, linear.chunkwise):
            with pytest.raises(error) as raised:
                form(**arguments | change)
            assert message in str(raised.value), str(raised.value)


def test_normaliser_reports_of_the_field():
    """FLA#850: heads one by one; FLA#875: dk has the denominator's part; FLA#267: z resumes; performer#40: v = 1 -> o = 1."""
    arguments = inputs("linear", T=128, HV=2, state=False)
    o, _ = linear.chunkwise(**arguments)
    for h in range(2):
        alone = {name: x[:, :, h : h + 1] for name, x in arguments.items()}
        torch.testing.assert_close(o[:, :, h : h + 1], linear.chunkwise(**alone)[0], **TIGHT)
    k = arguments["k"].clone().requires_grad_()
    (dk,) = torch.autograd.grad(linear.chunkwise(arguments["q"], k, arguments["v"])[0].sin().sum(), k)
    features = torch.einsum("bthk,bshk->bhts", elu1(arguments["q"]), elu1(k)).tril()
    masked = features / (features.sum(-1, keepdim=True) + 1e-6)
    (expected,) = torch.autograd.grad(torch.einsum("bhts,bshv->bthv", masked, arguments["v"]).sin().sum(), k)
    torch.testing.assert_close(dk, expected, **TIGHT)
