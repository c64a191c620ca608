"""The checker of exercises: it passes what is right, and says in words what is wrong, on how small an input."""

import functools
import importlib

import pytest
import torch

from linattn_edu.check import answers, check, check_answer
from linattn_edu.check.mutants import located
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


def naive(q, k, v):
    """A first exercise: normalised, without state or options."""
    S, z, outputs = torch.zeros(q.shape[0], *v.shape[2:], q.shape[-1]), 0, []
    for t in range(q.shape[1]):
        q_t, k_t = elu1(q[:, t]), elu1(k[:, t])
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
    assert "your function raises " in str(report) and "at `q_t, k_t = elu1(q[:, t]), elu1(k[:, t])`" in str(report)


def test_a_missing_gradient_is_told_in_words():
    report = check("linear.recurrent", lambda q, k, v: naive(q, k, v).detach(), quiet=True)
    assert [failure.theorem.key for failure in report.failures] == ["gradients"]
    assert "carry no gradient" in str(report)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="`name`: got 'linear.recurent', expected one of .*linear.recurrent"):
        check("linear.recurent", naive)


def test_the_report_repeats(capsys):
    for _ in range(2):
        check("linear.recurrent", lambda q, k, v: 2 * naive(q, k, v))
    out = capsys.readouterr().out
    assert out[: len(out) // 2] * 2 == out


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
    said = capsys.readouterr().out
    for words in (
        "✓ a.bytes: right.",
        "✗ a.bytes: not right: it counts the keys alone.",
        "✗ a.bytes: not right: it is off by a factor of 1024.",
        "✓ a.ratio: right to 3 significant digits.",
        "✗ a.ratio: not right to 3 significant digits: it is off by the sign.",
        "it is off by a factor of 100 (percent?).",
    ):
        assert words in said
    with pytest.raises(ValueError, match="`name`: got 'b', expected one of a.bytes, a.ratio, a.word"):
        check_answer("b", 1)
