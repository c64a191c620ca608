"""The checker of exercises: it passes what is right, and says in words what is wrong, on how small an input."""

import functools
import importlib
import json
import runpy
import sys

import pytest
import torch

from linattn_edu.check import answers, check, check_answer
from linattn_edu.check.copies import located
from linattn_edu.check.problems import problems
from linattn_edu.feature_maps import elu1

PROBLEMS = problems()


def packaged(name):
    """The package's own function for a name."""
    module, *path = located(name)
    return functools.reduce(getattr, path, importlib.import_module(f"linattn_edu.{module}"))


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_theorem_fails_on_the_package(name):
    report = check(name, packaged(name), quiet=True)
    assert report and report.held and not report.not_tested, str(report)


def naive(q, k, v, phi=elu1):
    """A first exercise: normalised, without state or options."""
    S, z, outputs = torch.zeros(q.shape[0], *v.shape[2:], q.shape[-1]), 0, []
    for t in range(q.shape[1]):
        q_t, k_t = elu1(q[:, t]), phi(k[:, t])
        S, z = S + v[:, t][..., None] * k_t[..., None, :], z + k_t
        outputs.append((S @ q_t[..., None])[..., 0] / ((z * q_t).sum(-1, keepdim=True) + 1e-6))
    return torch.stack(outputs, 1)


def test_a_subset_of_the_signature_is_tested_as_far_as_it_goes():
    report = check("linear.recurrent", naive, quiet=True)
    assert report
    reasons = {theorem.key: reason for theorem, reason in report.not_tested.items()}
    assert reasons["final state"] == "your function returns no state"
    assert reasons["initial state"] == "your function has no argument `initial_state`"


def test_the_smallest_failing_input_is_named():
    def strict(q, k, v):
        scores = torch.einsum("bthk,bshk->bhts", elu1(q), elu1(k)).tril(-1)
        return torch.einsum("bhts,bshv->bthv", scores / (scores.sum(-1, keepdim=True) + 1e-6), v)

    report = check("linear.parallel", strict, quiet=True)
    assert not report
    first = report.failures[0]
    assert first.theorem.key == "value" and first.input == "B = 1, T = 1, H = 1, HV = 1, K = 1, V = 1"


def test_an_input_that_is_changed_is_named():
    def careless(q, k, v):
        k += 1
        return naive(q, k - 1, v)

    [failure] = check("linear.recurrent", careless, quiet=True).failures
    assert failure.theorem.key == "unchanged" and failure.words.startswith("your function changes its input `k`: ")


def test_an_exception_is_told_in_words():
    def broken(q, k, v):
        return naive(q, k.transpose(1, 2), v)

    report = check("linear.recurrent", broken, quiet=True)
    assert [failure.theorem.key for failure in report.failures] == ["shapes"]
    said = " ".join(str(report).split())
    assert "your function raises " in said and "at `q_t, k_t = elu1(q[:, t]), phi(k[:, t])`" in said


def test_an_exception_in_a_backward_pass_is_told_in_words():
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            return dx @ dx[0]

    report = check("linear.recurrent", lambda q, k, v: Same.apply(naive(q, k, v)), quiet=True)
    assert {failure.theorem.key for failure in report.failures} == {"gradients"}
    said = " ".join(str(report).split())
    assert "your function raises RuntimeError: " in said and "at `return dx @ dx[0]`, in its backward pass" in said


def test_the_smallest_input_has_groups_of_heads_only_if_groups_are_at_fault():
    def flipped(q, k, v):
        return naive(q, k, v.flip(2))

    report = check("linear.recurrent", flipped, quiet=True, skip=("groups",))
    inputs = [failure.input for failure in report.failures]
    assert inputs and all(x.startswith("B = 1, T = 1, H = 2, HV = 2, ") for x in inputs), str(report)


def test_a_missing_gradient_is_told_in_words():
    report = check("linear.recurrent", lambda q, k, v: naive(q, k, v).detach(), quiet=True)
    assert [failure.theorem.key for failure in report.failures] == ["gradients"]
    assert "carry no gradient" in str(report)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="`name`: got 'linear.recurent', expected one of .*linear.recurrent"):
        check("linear.recurent", naive)


@pytest.mark.parametrize("function", [None, ..., 0.5])
def test_what_is_no_function_is_named(function):
    with pytest.raises(TypeError, match="`function`: got .*, expected a function"):
        check("feature_maps.relu", function)


@pytest.mark.parametrize(
    "name, right, wrong",
    [("gates.write_strength", torch.sigmoid, torch.tanh), ("feature_maps.relu", torch.relu, torch.exp)],
)
def test_functions_whose_signature_nobody_knows_get_the_data_in_order(name, right, wrong):
    report = check(name, right, quiet=True)
    assert report and any(theorem.key == "gradients" for theorem in report.held), str(report)
    assert "value" in [failure.theorem.key for failure in check(name, wrong, quiet=True).failures]


def test_arguments_may_be_positional_alone():
    report = check("linear.recurrent", lambda q, k, v, /: naive(q, k, v), quiet=True)
    assert report and report.function == "`<lambda>`", str(report)


def test_the_report_repeats(capsys):
    for _ in range(2):
        check("linear.recurrent", lambda q, k, v: 2 * naive(q, k, v))
    out = capsys.readouterr().out
    assert out[: len(out) // 2] * 2 == out


def test_no_line_of_a_report_is_wider_than_the_page(tmp_path, monkeypatch, capsys):
    def broken(q, k, v):
        raise RuntimeError("the sizes of the tensors do not fit together, " * 5)

    lines = str(check("linear.recurrent", broken, quiet=True)).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("    your function raises"))
    assert max(map(len, lines)) <= 88 and lines[start + 1].startswith("      ")
    monkeypatch.setattr(answers, "TABLE", tmp_path / "answers.json")
    answers.TABLE.write_text("{}")
    answers.register("a", 1, None, [(2, "is " + "wrong, " * 30 + "and long")])
    assert not check_answer("a", 2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 88 and lines[0].startswith("✗ a: not right: it is wrong")
    assert all(line.startswith("  wrong,") for line in lines[1:])


def test_answers_are_compared_by_hash(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(answers, "TABLE", tmp_path / "answers.json")
    answers.TABLE.write_text("{}")
    answers.register("a.bytes", 2048, slips=[(1024, "counts the keys alone")])
    answers.register("a.ratio", 3.14159, digits=3)
    answers.register("a.word", ["Linear", 2])
    assert "2048" not in answers.TABLE.read_text() and "3.14" not in answers.TABLE.read_text()
    assert check_answer("a.bytes", 2048) and check_answer("a.bytes", torch.tensor(2048.0))
    assert not check_answer("a.bytes", 2048.5) and not check_answer("a.bytes", 1024)
    assert not check_answer("a.bytes", 2)
    for near in (3.14, 3.142, 3.149, 3.131):
        assert check_answer("a.ratio", near)
    for far in (3.16, 3.12, -3.14, 314.159, "three", 0):
        assert not check_answer("a.ratio", far)
    assert check_answer("a.word", ("linear ", 2)) and not check_answer("a.word", ("linear", 3))
    assert not check_answer("a.word", (2, "linear"))
    said = capsys.readouterr().out
    for words in (
        "✓ a.bytes: right.",
        "✗ a.bytes: not right: it counts the keys alone.",
        "✗ a.bytes: not right: it is off by a factor of 1024.",
        "✓ a.ratio: right to 3 significant digits.",
        "✗ a.ratio: not right to 3 significant digits: it is off by the sign.",
        "it is off by a factor of 100 (percent?).",
        "✗ a.word: not right: it is right in another order.",
    ):
        assert words in said
    with pytest.raises(ValueError, match="`name`: got 'b', expected one of a.bytes, a.ratio, a.word"):
        check_answer("b", 1)

    monkeypatch.setattr(sys, "argv", ["check", "b", "0.5,yes", "--digits", "2", "--slip", "2,yes", "is upside down"])
    runpy.run_module("linattn_edu.check", run_name="__main__")
    assert check_answer("b", [0.499, "Yes"]) and not check_answer("b", [2, "yes"])
    assert "✗ b: not right to 2 significant digits: it is upside down." in capsys.readouterr().out

    monkeypatch.setattr(sys, "argv", ["check", "b", "2"])
    with pytest.raises(SystemExit):  # a reader's guess must not become the answer
        runpy.run_module("linattn_edu.check", run_name="__main__")
    assert "b has an answer already" in capsys.readouterr().err and check_answer("b", [0.5, "yes"])


@pytest.mark.parametrize(
    "value, got",
    [
        (..., "ellipsis Ellipsis"),
        (None, r"nothing \(None\)"),
        (1j, "complex 1j"),
        ({1}, r"set \{1\}"),
        ([1, None], r"nothing \(None\)"),
        (torch.ones(2, 2), r"list \[1.0, 1.0\]"),
    ],
)
def test_what_is_no_answer_is_named(value, got):
    with pytest.raises(TypeError, match=f"`value`: got {got}, expected a number, a word or a list of them"):
        check_answer("decay.half_life", value)


def test_answers_beyond_every_float_are_wrong():
    assert not any(check_answer("decay.half_life", x, quiet=True) for x in (10**400, -(10**400), [10**400], torch.inf))


def test_every_registered_answer_is_asked_for_in_the_book(root):
    book = "".join(path.read_text(encoding="utf-8") for path in root.glob("notebooks/*.ipynb"))
    for name in json.loads(answers.TABLE.read_text(encoding="utf-8")):
        assert f'check_answer(\\"{name}\\"' in book, name


def one_head(write):
    """A reader's plain loop over one head: `write(S, k, v, ...)` gives the new state [K, V]."""

    def gated(q, k, v, g, beta):
        return loop(q, k, v, g, beta)

    def decayed(q, k, v, g):
        return loop(q, k, v, g)

    def delta(q, k, v, beta):
        return loop(q, k, v, beta)

    def loop(q, k, v, *gates):
        S, outputs = torch.zeros(k.shape[-1], v.shape[-1]), []
        for t in range(len(q)):
            S = write(S, k[t], v[t], *(gate[t] for gate in gates))
            outputs.append(S.T @ q[t] / q.shape[-1] ** 0.5)
        return torch.stack(outputs), S

    return [decayed, delta, gated]


RULES = {
    ("decay.recurrent", ""): lambda S, k, v, g: g.exp() * S + torch.outer(k, v),
    ("gla.recurrent", ""): lambda S, k, v, g: g.exp()[:, None] * S + torch.outer(k, v),
    ("deltanet.recurrent", ""): lambda S, k, v, b: S + b * torch.outer(k, v - S.T @ k),
    ("gated_deltanet.recurrent", ""): lambda S, k, v, g, b: (
        g.exp() * (S - b * torch.outer(k, S.T @ k)) + b * torch.outer(k, v)
    ),
    ("kda.recurrent", ""): lambda S, k, v, g, b: delta_rule(g.exp()[:, None] * S, k, v, b),
    ("decay.recurrent", "multiplies the state by g instead of exp(g)"): lambda S, k, v, g: g * S + torch.outer(k, v),
    ("decay.recurrent", "decays the token's own write too"): lambda S, k, v, g: g.exp() * (S + torch.outer(k, v)),
    (
        "gla.recurrent",
        "decays the value channels (columns of the state) instead of the key channels",
    ): lambda S, k, v, g: g.exp() * S + torch.outer(k, v),
    ("deltanet.recurrent", "erases nothing before it writes"): lambda S, k, v, b: S + b * torch.outer(k, v),
    ("deltanet.recurrent", "has beta on the erasure but not on the write"): lambda S, k, v, b: (
        S - b * torch.outer(k, S.T @ k) + torch.outer(k, v)
    ),
    ("gated_deltanet.recurrent", "takes out what the state answered before it decayed"): lambda S, k, v, g, b: (
        g.exp() * S + b * torch.outer(k, v - S.T @ k)
    ),
    ("kda.recurrent", "gives all key channels the same, mean gate: Gated DeltaNet"): lambda S, k, v, g, b: delta_rule(
        g.mean().exp() * S, k, v, b
    ),
}


def delta_rule(S, k, v, beta):
    return S + beta * torch.outer(k, v - S.T @ k)


@pytest.mark.parametrize("name, slip", RULES)
def test_plain_code_of_one_head_is_judged_and_its_slip_named(name, slip):
    decayed, delta, gated = one_head(RULES[name, slip])
    function = {"deltanet": delta, "gated_deltanet": gated, "kda": gated}.get(name.partition(".")[0], decayed)
    report = check(name, function, heads=False, quiet=True)
    assert bool(report) == (not slip) and report.slip == slip, str(report)
    if slip:
        assert report.failures[0].input.startswith("T = ") and "H = " not in report.failures[0].input


def softmax_weights(scores):
    return (scores - scores.amax(-1, keepdim=True)).exp()


def attention(q, k, v, mask=lambda s: s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -torch.inf), repeat=None):
    group = q.shape[2] // k.shape[2]
    k, v = ((repeat or (lambda x: x.repeat_interleave(group, 2)))(x) for x in (k, v))
    weights = softmax_weights(mask(torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5))
    return torch.einsum("bhts,bshv->bthv", weights / weights.sum(-1, keepdim=True), v)


def blockwise(q, k, v, rescale=True):
    """A reader's online softmax, over blocks of 8 keys."""
    if q.shape[2] > k.shape[2]:
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    T, K = q.shape[1], q.shape[3]
    m, z, o = torch.full((*q.shape[:3], 1), -torch.inf), 0, 0
    for start in range(0, T, 8):
        s = torch.einsum("bthk,bshk->bths", q, k[:, start : start + 8]) / K**0.5
        hidden = torch.arange(T)[:, None] < torch.arange(start, start + s.shape[-1])
        s = s.masked_fill(hidden[:, None], -torch.inf)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        p, shrink, m = (s - new).exp(), (m - new).exp(), new
        z = shrink * z + p.sum(-1, keepdim=True)
        o = (shrink if rescale else 1) * o + torch.einsum("bths,bshv->bthv", p, v[:, start : start + 8])
    return o / z


@pytest.mark.parametrize(
    "name, function, slip",
    [
        ("softmax.parallel", attention, ""),
        ("softmax.online", blockwise, ""),
        (
            "softmax.online",
            lambda q, k, v: blockwise(q, k, v, False),
            "does not rescale the running output when the maximum grows",
        ),
        (
            "softmax.parallel",
            lambda q, k, v: attention(q, k, v, mask=lambda s: s * torch.ones(s.shape[-2:]).tril()),
            "masks the scores with 0, whose exponential is 1, instead of -inf",
        ),
        ("softmax.parallel", lambda q, k, v: attention(q, k, v, mask=lambda s: s), "has no causal mask"),
        (
            "softmax.parallel",
            lambda q, k, v: attention(q, k, v, repeat=lambda x: x.repeat(1, 1, q.shape[2] // k.shape[2], 1)),
            "tiles the heads (0 1 0 1) instead of repeating each (0 0 1 1)",
        ),
        (
            "linear.recurrent",
            lambda q, k, v: naive(q, k, v, phi=lambda x: x),
            "applies the feature map to q but not to k",
        ),
        ("feature_maps.elu1", lambda x: torch.nn.functional.elu(x), "leaves out the + 1"),
    ],
)
def test_a_slip_in_plain_code_is_named(name, function, slip):
    report = check(name, function, quiet=True)
    assert bool(report) == (not slip) and report.slip == slip, str(report)


def test_options_go_to_the_reference_and_need_no_argument():
    plain = {"feature_map": "identity", "normalize": False}

    def additive(q, k, v):
        return torch.einsum("bhts,bshv->bthv", (torch.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5).tril(), v)

    assert check("linear.parallel", additive, quiet=True, **plain)
    assert not check("linear.parallel", additive, quiet=True)
    unscaled = check("linear.parallel", lambda q, k, v: additive(q, k, v) * q.shape[-1] ** 0.5, quiet=True, **plain)
    assert unscaled.slip == "leaves out the scale K ** -0.5"
    assert check(
        "linear.parallel", lambda q, k, v: additive(q, k, v) * q.shape[-1] ** 0.5, quiet=True, scale=1, **plain
    )
    assert check("softmax.parallel", lambda q, k, v: attention(q, k, v, mask=lambda s: s), quiet=True, causal=False)


def test_theorems_can_be_left_out():
    report = check("linear.recurrent", naive, quiet=True, skip=("widths",))
    assert report and [t.key for t, why in report.not_tested.items() if why == "the exercise does not ask for it"] == [
        "widths"
    ]


@pytest.mark.parametrize("skip", ["packed states", ["packed states"], {"packed states"}])
def test_a_key_is_a_whole_key(skip):
    """Not "packed" as well, which is a part of the word."""
    report = check("linear.recurrent", packaged("linear.recurrent"), quiet=True, skip=skip)
    assert [theorem.key for theorem in report.not_tested] == ["packed states"] and report


@pytest.mark.parametrize("skip, got", [(("raged",), "'raged'"), ("state gradients", "'state .*'"), (["widths", 1], 1)])
def test_an_unknown_key_lists_the_known_ones(skip, got):
    with pytest.raises(ValueError, match=f"`skip`: got {got}, expected names among .*ragged, widths"):
        check("linear.recurrent", naive, skip=skip)


def test_one_head_may_have_a_state():
    def recurrent(q, k, v, g, initial_state=None):
        S, outputs = torch.zeros(k.shape[1], v.shape[1]) if initial_state is None else initial_state, [v[:0]]
        for t in range(len(q)):
            S = g[t].exp()[:, None] * S + torch.outer(k[t], v[t])
            outputs.append(q[t : t + 1] @ S / q.shape[1] ** 0.5)
        return torch.cat(outputs), S

    def step(q, k, v, state):
        K, V = torch.cat([state[0], k[None]]), torch.cat([state[1], v[None]])
        return (q @ K.T / len(q) ** 0.5).softmax(0) @ V, (K, V)

    for name, function in (("gla.recurrent", recurrent), ("softmax.step", step)):
        report = check(name, function, heads=False, quiet=True)
        assert report and {theorem.key for theorem in report.not_tested} <= {"scale"}, str(report)
    with pytest.raises(ValueError, match="`heads`: got False for mamba.step, expected a form of a variant"):
        check("mamba.step", step, heads=False)


def test_the_report_reads_as_in_the_book(capsys):
    def forgot_the_map(q, k, v):
        return naive(q, k, v, phi=lambda x: x)

    report = check("linear.recurrent", forgot_the_map, hints=False, skip=("groups",))
    report._ipython_display_()
    assert not report
    assert capsys.readouterr().out.splitlines() == [
        "linear.recurrent: 3 of 9 theorems hold for `forgot_the_map`",
        "✓ It returns the right shapes, in the dtype of its inputs",
        "✓ No output reads a later token",
        "✓ It leaves its inputs as they are",
        "✗ Its result is that of the definition",
        "    `o` is -0.974 at [0, 1, 0, 0], expected -1.38 (largest deviation 4.0e-01)",
        "    on the input B = 1, T = 2, H = 1, HV = 1, K = 1, V = 1",
        "✗ In float32 it is the same",
        "✗ One token is enough",
        "✗ Any number of tokens will do",
        "✗ Keys and values may differ in width",
        "✗ Its gradients are those of the definition",
        "- not tested, since the exercise does not ask for it: groups",
        "- not tested, since your function returns no state: final state",
        "- not tested, since your function has no argument `initial_state`: initial state,",
        "  resume, no tokens, state gradient",
        "- not tested, since your function has no argument `cu_seqlens`: packed, packed states",
        "- not tested, since your function has no argument `feature_map`: feature maps",
    ]
