"""Faults that users reported of public libraries, by the number under which this project keeps them.

Each is asked of every variant here, or of its own operator in the file that `ELSEWHERE` names. What needs a GPU or a
layer is listed with the reason: a later test of kernels or layers has to ask it.
"""

import re
from pathlib import Path

import pytest
import torch
from operators import CASES, inputs, leaves, tree_map

from linattn_edu import l2norm, linear

TIGHT = dict(rtol=1e-10, atol=1e-10)
FORMS = ["recurrent", "parallel", "chunkwise", "fused"]
EVERY = pytest.mark.parametrize("name", CASES)
REPORTS = [
    1, 2, 3, 4, 5, 9, 10, 11, 13, 14, 15, 16, 17, 18, 19, 20, 21, 24, 26, 27, 28, 29, 30, 31, 32, 33, 34, 36, 37, 38, 39,
    40, 42, 43, 44, 45, 46, 49, 50, 51, 53, 54, 55, 56, 58, 61,
]  # fmt: skip
ELSEWHERE = {
    1: "gla", 2: "gla", 3: "gla", 4: "gla", 5: "decay", 14: "gla", 15: "gla", 16: "gla", 17: "gla", 18: "gla",
    20: "delta_reports", 32: "delta_reports", 33: "delta_reports", 34: "short_conv", 36: "gla", 37: "gla", 51: "gates",
    53: "gla", 58: "mamba", 61: "gates",
}  # fmt: skip
NEEDS_GPU = {21, 43, 44, 45, 46, 56}
NEEDS_LAYER = {26, 30, 31, 38}


def run(name, form, arguments, **more):
    return getattr(CASES[name].module, form)(**arguments, **{"output_final_state": True, **more})


def assert_equal(got, expected):
    for x, y in zip(leaves(got), leaves(expected), strict=True):
        torch.testing.assert_close(x, y, **TIGHT)


def numbers_named(file):
    """The numbers after the words "report" and "reports" in a test file, and in the names of its tests."""
    text = (Path(__file__).parent / f"test_{file}.py").read_text()
    lists = re.findall(r"[Rr]eports?[ _](\d+(?:(?:, |,? and |_and_)\d+)*)", text)
    return {int(number) for found in lists for number in re.findall(r"\d+", found)}


def test_every_report_is_asked_somewhere():
    for number, file in ELSEWHERE.items():
        assert number in numbers_named(file), (number, file)
    assert numbers_named("reports") | ELSEWHERE.keys() | NEEDS_GPU | NEEDS_LAYER == set(REPORTS)


@pytest.mark.parametrize("form", FORMS)
def test_report_9_each_head_has_its_own_normaliser(form):
    """FLA#850, #594, #851: the running sum of the normaliser went along the heads."""
    arguments = inputs("linear", T=128, H=2, HV=2)
    o, _ = run("linear", form, arguments)
    for h in range(2):
        alone = {key: x[:, :, h : h + 1] for key, x in arguments.items() if key in "qkv"}
        alone["initial_state"] = tree_map(lambda x: x[:, h : h + 1], arguments["initial_state"])
        torch.testing.assert_close(run("linear", form, alone)[0], o[:, :, h : h + 1], **TIGHT)


@pytest.mark.parametrize("form", FORMS)
def test_report_10_the_gradient_of_k_passes_through_the_normaliser(form):
    """FLA#875: dk lacked the part of the denominator."""
    a = inputs("linear", B=2, T=64, H=2, HV=2, K=8, V=8, state=False)
    q, k = a["q"].abs(), a["k"].abs().requires_grad_()
    (dk,) = torch.autograd.grad(run("linear", form, a | {"q": q, "k": k})[0].sin().sum(), k)
    features = torch.einsum("bthk,bshk->bhts", 1 + q, 1 + k).tril()
    weights = features / (features.sum(-1, keepdim=True) + 1e-6)
    o = torch.einsum("bhts,bshv->bthv", weights, a["v"])
    torch.testing.assert_close(dk, torch.autograd.grad(o.sin().sum(), k)[0], **TIGHT)


@pytest.mark.parametrize("form", FORMS)
def test_report_11_the_normaliser_is_part_of_the_state(form):
    """FLA#267: z was lost on resuming."""
    q, k, v = (inputs("linear", state=False)[name] for name in "qkv")
    whole, last = linear.recurrent(q, k, v, output_final_state=True)
    _, state = getattr(linear, form)(q[:, :18], k[:, :18], v[:, :18], output_final_state=True)
    rest, again = getattr(linear, form)(q[:, 18:], k[:, 18:], v[:, 18:], initial_state=state, output_final_state=True)
    torch.testing.assert_close(rest, whole[:, 18:], **TIGHT)
    assert_equal(again, last)


@pytest.mark.parametrize("form", FORMS)
def test_report_13_no_scale_is_a_scale_that_may_be_passed(form):
    """FLA#130: scale=None raised where the output is normalised."""
    arguments = inputs("linear")
    assert_equal(run("linear", form, arguments, scale=None)[0], run("linear", form, arguments)[0])


@pytest.mark.parametrize("form", FORMS)
@EVERY
def test_report_19_no_gradient_reads_memory_that_nobody_wrote(name, form):
    """FLA#862: the backward of an ungated call read an uninitialised buffer."""
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        a = {k: x.requires_grad_() if isinstance(x, torch.Tensor) else x for k, x in inputs(name, state=False).items()}
        o, last = run(name, form, a)
        sum(x.sum() for x in [o, *leaves(last)]).backward()
        assert all(x.grad.isfinite().all() for x in a.values() if isinstance(x, torch.Tensor))
    finally:
        torch.use_deterministic_algorithms(False)


@EVERY
def test_report_24_packed_sequences_need_a_batch_of_one(name):
    """FLA#837, #839, #844: a batch of packed rows was accepted."""
    with pytest.raises(ValueError, match="`cu_seqlens`: got B = 2, expected B = 1"):
        run(name, "fused", inputs(name), cu_seqlens=torch.tensor([0, 20, 37]))


@pytest.mark.parametrize("form", FORMS)
@EVERY
def test_report_27_no_state_leaks_into_the_next_document(name, form):
    """SkyRL#2056: packed documents shared a state."""
    a = inputs(name, B=1, state=False)
    packed, _ = run(name, form, a, cu_seqlens=torch.tensor([0, 20, 37]))
    second, _ = run(name, form, {k: x[:, 20:] if isinstance(x, torch.Tensor) else x for k, x in a.items()})
    torch.testing.assert_close(packed[:, 20:], second, **TIGHT)


@EVERY
def test_reports_28_and_29_prefill_and_decode_are_one_pass(name):
    """FLA#285, state-spaces/mamba#500, transformers#46190: the split, or one decoded token, gave other numbers."""
    a = inputs(name, T=100, state=False)
    whole, _ = run(name, "recurrent", a)
    for cut in (1, 37, 63, 64, 99):
        early, late = (
            {k: x[:, part] if isinstance(x, torch.Tensor) else x for k, x in a.items()} for part in (slice(cut), cut)
        )
        first, state = run(name, "chunkwise", early)
        torch.testing.assert_close(first, whole[:, :cut], **TIGHT)
        token = {{"q": "q_t", "k": "k_t", "v": "v_t"}.get(k, k): x for k, x in late.items()}
        o_t, _ = CASES[name].module.step(**token, state=state)
        torch.testing.assert_close(o_t, whole[:, cut], **TIGHT)


@pytest.mark.parametrize("form", FORMS)
@EVERY
def test_report_39_nothing_detaches_and_gates_go_by_name(name, form):
    """FLA 0.6.0: a form detached its inputs silently; positional gates landed in the wrong argument."""
    a = {k: x.requires_grad_() if isinstance(x, torch.Tensor) else x for k, x in inputs(name, state=False).items()}
    for key in (k for k, x in a.items() if isinstance(x, torch.Tensor)):
        others = {k: x.detach() for k, x in a.items() if isinstance(x, torch.Tensor) and k != key}
        o, last = run(name, form, a | others)
        assert o.requires_grad and (key == "q" or all(x.requires_grad or key == "v" for x in leaves(last)))
    gates = [a[gate] for gate in CASES[name].gates]
    if gates:
        with pytest.raises(TypeError, match="positional arguments, expected 3"):
            getattr(CASES[name].module, form)(a["q"], a["k"], a["v"], *gates)


@pytest.mark.parametrize("form", FORMS)
@EVERY
def test_report_40_two_runs_give_the_same_bits(name, form):
    """FLA#945, #1228: outputs and gradients changed from run to run."""
    def once():
        a = {k: x.float().requires_grad_() if isinstance(x, torch.Tensor) else x for k, x in inputs(name, state=False).items()}
        o, _ = run(name, form, a)
        o.square().sum().backward()
        return [o, *(x.grad for x in a.values() if isinstance(x, torch.Tensor))]

    assert all(torch.equal(x, y) for x, y in zip(once(), once(), strict=True))


def test_report_42_compiling_changes_no_result():
    """FLA#52, #909: torch.compile gave NaN."""
    a = inputs("linear-plain", T=40, K=8, V=8, state=False)
    compiled = torch.compile(linear.chunkwise, backend="aot_eager", fullgraph=True)
    o, _ = compiled(**a, chunk_size=16)
    torch.testing.assert_close(o, linear.recurrent(**a)[0], **TIGHT)


@EVERY
def test_report_49_heads_before_tokens_are_caught_where_sizes_differ(name):
    """transformers#40963, #41036: swapped axes were computed on without a word."""
    a = inputs(name)
    for key in ("k", "v", *CASES[name].gates):
        with pytest.raises(ValueError, match=rf"`{key}`: got shape .*heads before tokens"):
            run(name, "chunkwise", a | {key: a[key].transpose(1, 2)})


@EVERY
def test_report_50_a_state_is_K_by_V(name):
    """vllm#40956, #41292: the state [K, V] was read as [V, K], unseen where K = V."""
    a = inputs(name, K=6, V=6)
    S = leaves(a["initial_state"])[0]
    turned = (S.mT, a["initial_state"][1]) if isinstance(a["initial_state"], tuple) else S.mT
    o, last = run(name, "chunkwise", a)
    assert (run(name, "chunkwise", a | {"initial_state": turned})[0] - o).abs().max() > 1e-2
    no_tokens = {k: x[:, :0] if isinstance(x, torch.Tensor) and k != "initial_state" else x for k, x in a.items()}
    assert_equal(run(name, "chunkwise", no_tokens | {"initial_state": last})[1], last)
    a = inputs(name)
    with pytest.raises(ValueError, match="`initial_state"):
        run(name, "chunkwise", a | {"initial_state": tree_map(lambda x: x.mT if x.dim() == 4 else x, a["initial_state"])})


@pytest.mark.parametrize("form", [*FORMS, "bidirectional"])
def test_report_54_a_mean_of_ones_is_one(form):
    """performer-pytorch#40: the normaliser was missing."""
    q, k, v = (inputs("linear", state=False)[name] for name in "qkv")
    o, _ = getattr(linear, form)(q, k, torch.ones_like(v), eps=0.0)
    torch.testing.assert_close(o, torch.ones_like(o), **TIGHT)


def test_report_55_short_texts_are_cheaper_with_softmax_and_long_ones_are_not():
    """fast-transformers#83, #130: linear attention was slower than softmax, at short lengths; counted here, not timed."""
    from torch.utils.flop_counter import FlopCounterMode

    from linattn_edu import softmax

    def flops(form, T):
        q, k, v = torch.ones(3, 1, T, 1, 64).unbind()
        with FlopCounterMode(display=False) as counter:
            form(q, k, v)
        return counter.get_total_flops()

    assert flops(softmax.parallel, 64) < flops(linear.chunkwise, 64)
    assert flops(softmax.parallel, 1024) > 4 * flops(linear.chunkwise, 1024)


def test_reports_32_and_33_a_zero_vector_has_no_direction_and_a_finite_gradient():
    """pytorch#184575, keras#23075: normalising a zero row gave NaN or a gradient of 1e12."""
    x = torch.zeros(3, 5, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(l2norm(x).sum(), x)
    assert torch.equal(l2norm(x), torch.zeros_like(x)) and slope.abs().max() <= 1e3
