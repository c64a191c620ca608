"""SwiGLU and the mixture of experts, against one token and one expert at a time."""

import numpy as np
import pytest
import torch

from linattn_edu.layers.moe import MixtureOfExperts, Router
from linattn_edu.layers.swiglu import SwiGLU

D, F, E = 6, 5, 8
KINDS = {
    "softmax": dict(top_k=3),
    "qwen": dict(top_k=2, shared=7, shared_gate=True),
    "raw": dict(top_k=3, renormalize=False, scale=0.5, shared=4),
    "kimi": dict(top_k=2, scoring="sigmoid", scale=2.446, shared=4),
    "groups": dict(top_k=3, scoring="sigmoid", groups=4, top_groups=2),
    "softmax_groups": dict(top_k=2, groups=2, top_groups=1),
    "groups_of_one": dict(top_k=2, scoring="sigmoid", groups=8, top_groups=3),
    "all": dict(top_k=8),
}
ALL = pytest.mark.parametrize("kind", KINDS)


def shaken(kind, seed=0):
    torch.manual_seed(seed)
    layer = MixtureOfExperts(D, F, E, **KINDS[kind]).double()
    with torch.no_grad():
        for p in [*layer.parameters(), *layer.buffers()]:
            p.add_(0.5 * torch.randn_like(p))
    return layer


def tokens(*shape, seed=1):
    return torch.randn(*shape, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def swiglu(x, up, down):
    a, b = np.split(up @ x, 2)
    return down @ (a * sigmoid(a) * b)


def oracle(layer, x, options):
    """x [D] -> y [D]."""
    w = {name: p.detach().numpy() for name, p in [*layer.named_parameters(), *layer.named_buffers()]}
    logits = w["router.weight"] @ x
    sigmoidal = options.get("scoring") == "sigmoid"
    scores = sigmoid(logits) if sigmoidal else np.exp(logits) / np.exp(logits).sum()
    preference = scores + (w["router.correction_bias"] if sigmoidal else 0)
    groups = np.split(np.arange(E), options.get("groups", 1))
    by_worth = sorted(groups, key=lambda g: -sum(sorted(preference[g])[-2:]))
    candidates = np.concatenate(by_worth[: options.get("top_groups", 1)])
    chosen = sorted(candidates, key=lambda e: -preference[e])[: options["top_k"]]
    weights = options.get("scale", 1) * scores[chosen]
    if options.get("renormalize", True):
        weights = weights / scores[chosen].sum()
    y = sum(weight * swiglu(x, w["up"][e], w["down"][e]) for weight, e in zip(weights, chosen))
    if options.get("shared"):
        gate = sigmoid(w["shared_gate.weight"][0] @ x) if options.get("shared_gate") else 1
        y = y + gate * swiglu(x, w["shared.up.weight"], w["shared.down.weight"])
    return y


@ALL
def test_layer_is_its_formulas(kind):
    layer, x = shaken(kind), tokens(2, 21)
    y = layer(x)
    assert y.shape == x.shape
    for token, each in zip(x.flatten(0, 1), y.flatten(0, 1)):
        np.testing.assert_allclose(each.detach().numpy(), oracle(layer, token.numpy(), KINDS[kind]), rtol=0, atol=1e-12)


@ALL
def test_a_token_is_alone(kind):
    """What the others are, and how many, changes nothing: no expert is ever full."""
    layer, x = shaken(kind), tokens(3, 5)
    y = layer(x)
    torch.testing.assert_close(layer(x[1:2, 2:3]), y[1:2, 2:3], rtol=0, atol=1e-12)
    torch.testing.assert_close(layer(x[:, :1].expand(-1, 50, -1)), y[:, :1].expand(-1, 50, -1), rtol=0, atol=1e-12)
    assert layer(x[:, :0]).shape == (3, 0, D)


@ALL
def test_gradients_are_those_of_the_formulas(kind):
    layer, x = shaken(kind), tokens(4).requires_grad_()
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters)), (x,))

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()), fast_mode=True)


def test_the_correction_moves_the_choice_and_not_the_weights():
    torch.manual_seed(0)
    router, x = Router(D, E, 2, scoring="sigmoid").double(), tokens(30)
    weights, chosen = router(x)
    router.correction_bias += 5.0
    assert all(torch.equal(a, b) for a, b in zip(router(x), (weights, chosen))), "the same for all moves nothing"
    router.correction_bias[3] += 1.5
    moved, forced = router(x)
    assert (forced == 3).any(1).all() and not (chosen == 3).any(1).all()
    same = (forced.sort(1).values == chosen.sort(1).values).all(1)
    torch.testing.assert_close(moved[same].sort(1).values, weights[same].sort(1).values, rtol=0, atol=0)
    assert "correction_bias" in router.state_dict() and not router.correction_bias.requires_grad


def test_rebalancing_evens_the_load():
    """A router that always liked expert 0 comes to use all its experts alike; its weights are untouched."""
    torch.manual_seed(0)
    router, x = Router(D, E, 2, scoring="sigmoid"), tokens(400).float().abs()
    with torch.no_grad():
        router.weight[0] += 1.0
    before, load = router.weight.clone(), lambda: torch.bincount(router(x)[1].flatten(), minlength=E)
    assert load().max() > 2.5 * load().float().mean()
    for _ in range(300):
        router.rebalance(router(x)[1], rate=3e-3)
    assert load().max() < 1.2 * load().float().mean() and load().min() > 0.8 * load().float().mean()
    assert torch.equal(router.weight, before)
    with pytest.raises(ValueError, match="`scoring`: got 'softmax', expected 'sigmoid'"):
        Router(D, E, 2).rebalance(torch.tensor([[0, 1]]))


def test_a_group_bounds_the_choice():
    """With one group of two open, all chosen experts lie in the same half."""
    torch.manual_seed(0)
    router = Router(D, E, 3, scoring="sigmoid", groups=2, top_groups=1).double()
    halves = router(tokens(50))[1] // (E // 2)
    assert (halves == halves[:, :1]).all() and halves.unique().tolist() == [0, 1]


def test_scores_are_float32_where_the_layer_is_not():
    """In bfloat16 two of 512 scores are often equal; the choice is made in float32."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(D, F, 512, 10).bfloat16()
    x = tokens(20).bfloat16()
    weights, chosen = layer.router(x)
    assert weights.dtype == torch.float32 and layer(x).dtype == torch.bfloat16
    exact = (x.float() @ layer.router.weight.float().T).softmax(-1).topk(10)
    assert torch.equal(chosen, exact.indices)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer.router(x)[0], weights, rtol=0, atol=0)


def test_swiglu_is_its_formula():
    torch.manual_seed(0)
    layer, x = SwiGLU(D, F).double(), tokens(3)
    for token, y in zip(x, layer(x)):
        oracle = swiglu(token.numpy(), *(p.detach().numpy() for p in layer.parameters()))
        np.testing.assert_allclose(y.detach().numpy(), oracle, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(top_k=9), "`top_k`: got 9, expected a whole number from 1 to 8"),
        (dict(top_k=0), "`top_k`: got 0, expected a whole number from 1 to 8"),
        (dict(top_k=5, groups=4, top_groups=2), "`top_k`: got 5, expected a whole number from 1 to 4"),
        (dict(top_k=1, groups=0), "`groups`: got 0, expected a whole number of at least 1"),
        (dict(top_k=1, shared=-1), "`shared`: got -1, expected a whole number of at least 0"),
        (dict(top_k=1, groups=3), "`groups`, `top_groups`: got 3 and 1, expected a divisor of the 8 experts"),
        (dict(top_k=1, groups=4, top_groups=5), "`groups`, `top_groups`: got 4 and 5"),
        (dict(top_k=1, scoring="relu"), "`scoring`: got 'relu', expected 'softmax' or 'sigmoid'"),
    ],
)
def test_bad_sizes_are_named(options, message):
    with pytest.raises(ValueError) as error:
        MixtureOfExperts(D, F, E, **options)
    assert message in str(error.value)


@pytest.mark.parametrize("make", [lambda: MixtureOfExperts(D, 0, E, 2), lambda: SwiGLU(D, 0)])
def test_no_channels_are_refused(make):
    with pytest.raises(ValueError, match="`hidden`: got 0, expected a whole number of at least 1"):
        make()
