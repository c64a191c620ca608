"""Softmax attention: every form is exact, and decoding with a KV cache is one forward pass."""

import numpy as np
import pytest
import torch

from linattn_edu import softmax

TIGHT = dict(rtol=1e-10, atol=1e-10)
FORMS = {
    "recurrent": {},
    "parallel": {},
    "chunkwise": {},
    "chunkwise-1": {"chunk_size": 1},
    "chunkwise-16": {"chunk_size": 16},
    "fused": {},
}


def inputs(T=37, L=0, HQ=4, H=2, K=5, V=7, B=2, dtype=torch.float64, seed=0, sharp=1.0):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    q, k, v = sharp * normal(B, T, HQ, K), normal(B, T, H, K), normal(B, T, H, V)
    state = {"initial_state": (normal(B, L, H, K), normal(B, L, H, V))} if L else {}
    return {"q": q, "k": k, "v": v} | state


def run(form, arguments, **more):
    return getattr(softmax, form.partition("-")[0])(**arguments, **FORMS[form], **more)


def numpy_attention(q, k, v, causal, initial_state=None, scale=None):
    q, k, v = (x.numpy() for x in (q, k, v))
    if initial_state is not None:
        k, v = (np.concatenate([old.numpy(), x], 1) for old, x in zip(initial_state, (k, v)))
    (B, T, HQ, K), L = q.shape, k.shape[1]
    o = np.zeros((B, T, HQ, v.shape[-1]))
    for b in range(B):
        for h in range(HQ):
            shared = h // (HQ // k.shape[2])
            for t in range(T):
                last = L - T + t + 1 if causal else L
                p = np.exp(k[b, :last, shared] @ q[b, t, h] * (K**-0.5 if scale is None else scale))
                o[b, t, h] = p @ v[b, :last, shared] / p.sum()
    return o


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("L", [0, 1, 20])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_numpy_sum(form, L, causal):
    for T in (1, 16, 37, 70):
        arguments = inputs(T, L)
        o, state = run(form, arguments, causal=causal, output_final_state=True)
        expected = torch.from_numpy(numpy_attention(**arguments, causal=causal))
        torch.testing.assert_close(o, expected, **TIGHT)
        assert state[0].shape == (2, L + T, 2, 5) and state[1].shape == (2, L + T, 2, 7)
        torch.testing.assert_close(state[0][:, L:], arguments["k"], rtol=0, atol=0)


def test_scale_multiplies_the_scores():
    arguments = inputs()
    for form in FORMS:
        expected = torch.from_numpy(numpy_attention(**arguments, causal=True, scale=2.0))
        torch.testing.assert_close(run(form, arguments, scale=2.0)[0], expected, **TIGHT)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "parallel"])
def test_every_gradient_is_that_of_parallel(form, causal):
    results = []
    for name in (form, "parallel"):
        arguments = inputs(37, 9)
        leaves = [arguments["q"], arguments["k"], arguments["v"], *arguments["initial_state"]]
        for x in leaves:
            x.requires_grad_()
        o, state = run(name, arguments, causal=causal, output_final_state=True)
        loss = (o * o.detach().cos()).sum() + state[0].sin().sum() + state[1].cos().sum()
        results.append(torch.autograd.grad(loss, leaves))
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, **TIGHT)


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise-16", "fused"])
def test_gradcheck(form):
    arguments = inputs(18, B=1, HQ=2, H=1, K=3, V=2)
    function = lambda q, k, v: run(form, {"q": q, "k": k, "v": v})[0]
    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in arguments.values()], fast_mode=True)


def test_decoding_with_the_cache_is_one_pass():
    arguments = inputs()
    o, cache = softmax.parallel(**arguments, output_final_state=True)
    state = (arguments["k"][:, :0], arguments["v"][:, :0])
    for t in range(37):
        o_t, state = softmax.step(arguments["q"][:, t], arguments["k"][:, t], arguments["v"][:, t], state)
        torch.testing.assert_close(o_t, o[:, t], **TIGHT)
    assert all(torch.equal(x, y) for x, y in zip(state, cache))


@pytest.mark.parametrize("form", FORMS)
def test_split_and_resume_is_one_pass(form):
    arguments = inputs(70)
    o, cache = softmax.parallel(**arguments, output_final_state=True)
    for cut in (0, 1, 16, 69, 70):
        first, state = run(form, {key: x[:, :cut] for key, x in arguments.items()}, output_final_state=True)
        rest = {key: x[:, cut:] for key, x in arguments.items()}
        second, state = run(form, rest, initial_state=state, output_final_state=True)
        torch.testing.assert_close(torch.cat([first, second], 1), o, **TIGHT)
        assert all(torch.equal(x, y) for x, y in zip(state, cache))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_packed_is_separate(form, causal):
    arguments, bounds = inputs(70, B=1), [0, 0, 1, 20, 20, 70, 70]
    o, _ = run(form, arguments, causal=causal, cu_seqlens=torch.tensor(bounds))
    assert o.shape == (1, 70, 4, 7)
    for start, stop in zip(bounds, bounds[1:]):
        alone, _ = softmax.parallel(**{key: x[:, start:stop] for key, x in arguments.items()}, causal=causal)
        torch.testing.assert_close(o[:, start:stop], alone, **TIGHT)


@pytest.mark.parametrize("form", FORMS)
def test_later_tokens_change_no_bit_of_an_earlier_output(form):
    arguments, other = (inputs(70, dtype=torch.float32, seed=seed) for seed in (0, 1))
    o, _ = run(form, arguments)
    for cut in (1, 16, 40, 69):
        mixed = {key: torch.cat([x[:, :cut], other[key][:, cut:]], 1) for key, x in arguments.items()}
        assert torch.equal(run(form, mixed)[0][:, :cut], o[:, :cut])


def test_the_cache_is_a_copy_and_inputs_stay():
    arguments = inputs()
    before = [x.clone() for x in arguments.values()]
    _, state = softmax.parallel(**arguments, output_final_state=True)
    state[0].zero_(), state[1].zero_()
    assert all(torch.equal(x, y) for x, y in zip(arguments.values(), before))


@pytest.mark.parametrize("form", FORMS)
def test_no_tokens_give_no_output(form):
    arguments = inputs(0, 3)
    leaves = [x.requires_grad_() for x in (arguments["q"], arguments["k"], arguments["v"])]
    o, state = run(form, arguments, output_final_state=True)
    assert o.shape == (2, 0, 4, 7) and all(torch.equal(x, y) for x, y in zip(state, arguments["initial_state"]))
    assert [x.shape for x in torch.autograd.grad(o.sum(), leaves)] == [x.shape for x in leaves]


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise", "chunkwise-1"])
def test_huge_scores_stay_finite_with_their_gradients(form):
    arguments = inputs(sharp=1e4, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in arguments.values()]
    o, _ = run(form, arguments)
    assert o.isfinite().all() and all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), leaves))
    exact = softmax.parallel(**{key: x.double() for key, x in arguments.items()})[0]
    torch.testing.assert_close(o.double(), exact, rtol=0, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
def test_output_and_cache_keep_the_input_dtype(form, dtype):
    arguments = inputs(37, 5, dtype=dtype)
    o, state = run(form, arguments, output_final_state=True)
    exact, _ = softmax.parallel(
        **{key: x.double() if key in "qkv" else tuple(y.double() for y in x) for key, x in arguments.items()}
    )
    assert o.dtype == dtype and all(x.dtype == dtype for x in state)
    torch.testing.assert_close(o.double(), exact, rtol=0, atol=4 * torch.finfo(dtype).eps * exact.abs().max().item())


BAD = [
    (ValueError, {"q": lambda x: x[:, :, :3]}, "`q`: got HQ = 3 heads, expected a multiple of H = 2"),
    (ValueError, {"v": lambda x: x[:, :, :1]}, "`v`: got shape [2, 37, 1, 7], expected [B, T, H, V] with B = 2"),
    (ValueError, {"k": lambda x: x.transpose(1, 2)}, "heads before tokens ([B, H, T, ...]): transpose(1, 2)"),
    (ValueError, {"k": lambda x: x.half()}, "`k`: got dtype torch.float16, expected torch.float64 as in `q`"),
    (ValueError, {"scale": float("inf")}, "`scale`: got inf, expected a finite number"),
    (ValueError, {"cu_seqlens": torch.tensor([0, 37]), "output_final_state": True}, "`cu_seqlens`: got packed sequences"),
    (ValueError, {"cu_seqlens": torch.tensor([0, 37])}, "`cu_seqlens`: got B = 2, expected B = 1"),
    (TypeError, {"causal": None}, "`causal`: got nothing (None), expected True or False"),
    (TypeError, {"initial_state": torch.zeros(3)}, "`initial_state`: got a tensor of shape [3], expected the tuple (k, v)"),
    (TypeError, {"v": None}, "`v`: got nothing (None), expected a tensor [B, T, H, V]"),
    (TypeError, {"mask": None}, "got the unknown argument `mask`"),
]


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise", "fused"])
@pytest.mark.parametrize("error, change, message", BAD)
def test_bad_arguments_are_named(error, change, message, form):
    arguments = inputs()
    for key, new in change.items():
        arguments[key] = new(arguments[key]) if callable(new) else new
    with pytest.raises(error) as raised:
        run(form, arguments)
    assert message in str(raised.value)


def test_bad_steps_are_named():
    q, k, v = (x[:, 0] for x in inputs().values())
    cache = (torch.zeros(2, 3, 2, 5).double(), torch.zeros(2, 3, 2, 7).double())
    for error, arguments, message in [
        (TypeError, (q, k, v), "got no argument `state`"),
        (TypeError, (q, k, v, None), "`state`: got nothing (None), expected the tuple (k, v)"),
        (ValueError, (q[:, :3], k, v, cache), "`q_t`: got HQ = 3 heads, expected a multiple of H = 2"),
        (ValueError, (q, k, v, cache[::-1]), "`state[0]`: got shape [2, 3, 2, 7], expected [B, L, H, K] with"),
    ]:
        with pytest.raises(error) as raised:
            softmax.step(*arguments)
        assert message in str(raised.value)
