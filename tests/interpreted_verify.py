"""The record of the GPU's errors, made here by the interpreter: tests/test_verify.py runs this file."""

import csv
from unittest import mock

import pytest
import torch

from linattn_edu import decay, kda
from linattn_edu.kernels import one_call, verify

SIZES = dict(B=1, T=20, H=1, HV=2, K=8, V=12)


@pytest.mark.parametrize("dtype", verify.DTYPES)
@pytest.mark.parametrize("name", ["linear", "kda"])
def test_right_kernels_are_ok(name, dtype):
    """For float16 PyTorch has no TF32 products to compare with here: the digits of TF32 stand in for its errors."""
    regime = "weak" if name == "kda" else "zero"
    row = verify.case(name, regime, dtype, **SIZES, device="cpu")
    assert row["ok"] is True or (dtype == torch.float16 and float(row["error"]) < 2**-10)
    assert row["check"] == "whole" and row["T"] == 20
    assert all(float(row[key]) < 1e-2 for key in ("o", "state", "dq", "dk", "dv", "dinitial_state"))
    assert (row["dg"] != "") == (name == "kda")
    sizes = {key: x for key, x in SIZES.items() if key != "T"}
    assert verify.one_token(name, regime, dtype, **sizes, device="cpu")["ok"] is True


@pytest.mark.parametrize("dtype", verify.DTYPES)
def test_the_right_scan_is_ok(dtype):
    row = verify.selective_scan("zoh", "weak", dtype, B=1, T=9, D=3, N=2, device="cpu")
    assert row["ok"] is True and row["dA"] != "" and row["dq"] == "" and row["variant"] == "mamba zoh"


def two_numbers(errors_of_draws):
    """`verify.computed` for a variant whose one gradient is two numbers; the pairs of errors, ours and theirs, by draw."""

    def computed(name, regime, dtype, seed, *rest):
        y = torch.tensor([3.0, 4.0], dtype=torch.float64)
        ours, theirs = ({"dbeta": (y * (1 + x),)} for x in errors_of_draws[seed])
        return ours, ours, theirs, {"dbeta": (y,)}

    return mock.patch.object(verify, "computed", computed)


def test_two_numbers_are_judged_over_all_draws_and_alone_they_are_counted():
    """Errors of 1 to 4 thousandths a draw: their root mean square is what counts, whichever is larger where."""
    luck = [(4e-3, 1e-3), (1e-3, 4e-3), (2e-3, 2e-3), (1e-3, 3.5e-3)]
    with two_numbers(luck):
        row, alone = (verify.case("kda", "weak", torch.bfloat16, B=1, T=1, draws=n) for n in (4, 1))
    assert row["ok"] is True and row["note"] == "4 draws, dbeta beyond in 1 and its reference in 2"
    assert (row["error"], row["reference"]) == ("2.35e-03", "2.88e-03")
    assert alone["ok"] is False and alone["note"] == ""
    with two_numbers([(4e-3, 1e-3)] * 4):
        assert verify.case("kda", "weak", torch.bfloat16, B=1, T=1, draws=4)["ok"] is False


def test_alike_errors_of_two_numbers_are_beyond_three_times_each_other_in_a_tenth():
    """The F-distribution with 2 and 2 degrees of freedom: P(F > 9) = 1 / (1 + 9)."""
    draw = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(2, 100_000, 2, generator=draw).norm(dim=-1)
    assert (ours > 3 * theirs).float().mean().item() == pytest.approx(0.1, abs=0.003)


def test_draws_differ_and_the_first_is_the_one_draw_of_other_cases():
    sizes = SIZES | {"T": 1}
    first, second = (verify.computed("kda", "weak", torch.float32, seed, None, "cpu", sizes) for seed in (0, 1))
    a = verify.rounded(verify.inputs("kda", "weak", **sizes), torch.float32, "cpu")
    assert verify.same(first[0], verify.results(kda.fused, a, backend="triton"))
    assert not any(torch.equal(x, y) for name in first[0] for x, y in zip(first[0][name], second[0][name]))
    row = verify.case("kda", "weak", torch.bfloat16, **sizes, draws=8, device="cpu")
    assert row["ok"] is True and row["T"] == 1 and row["note"].startswith("8 draws")


def test_packed_sequences():
    row = verify.case("decay", "strong", torch.float32, B=1, T=20, H=1, HV=2, K=8, V=12, bounds=[0, 0, 1, 20], device="cpu")
    assert row["ok"] is True and row["check"] == "packed"


def test_a_wrong_gradient_is_not_ok():
    right = decay.fused

    def wrong(**a):
        return right(**a | {"g": a["g"] + 1e-3 * a["g"].detach()})

    with mock.patch.object(decay, "fused", wrong):
        row = verify.case("decay", "strong", torch.float32, **SIZES, device="cpu")
    assert row["ok"] is False and float(row["error"]) > 3 * float(row["reference"])


def test_calls_that_differ_are_not_ok():
    right, calls = kda.fused, []

    def drifting(**a):
        calls.append(0)
        o, state = right(**a)
        return o * (1 + 1e-7 * len(calls)), state

    with mock.patch.object(kda, "fused", drifting):
        row = verify.case("kda", "weak", torch.float32, **SIZES, device="cpu")
    assert row["ok"] is False and row["note"] == "two calls differ"


def test_the_reference_multiplies_like_the_kernels():
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        row = verify.case("gated_deltanet", "weak", dtype, **SIZES, device="cpu")
        found[dtype] = float(row["reference"])
    assert found[torch.float32] < 1e-6 < 1e-3 < found[torch.bfloat16] < 2e-2, found


def test_what_a_check_raises_is_a_line(tmp_path, capsys):
    [row] = verify.attempt(verify.case, "kda", "weak", torch.float32, **SIZES | {"K": 300}, device="cpu")
    assert row["ok"] is False and "the kernels serve K <= 256" in row["note"] and row["K"] == 300
    rows = [verify.case("decay", "weak", torch.float32, **SIZES, device="cpu"), row]
    verify.write(tmp_path / "errors.csv", rows)
    lines = [text for text in (tmp_path / "errors.csv").read_text().splitlines() if not text.startswith("#")]
    assert [r["ok"] for r in csv.DictReader(lines)] == ["True", "False"]
    assert "1 of 2 cases ok" in capsys.readouterr().out


def test_the_plan_covers_every_variant_dtype_regime_and_size():
    tasks = list(verify.small())
    cases = {(task[1], task[2], task[3], task[4]["K"], task[4]["V"]) for task in tasks if task[0] is verify.case}
    assert len(cases) == len(verify.REGIMES_OF) * 3 * 4
    lengths = {task[4]["T"] for task in [*tasks, *verify.large()] if task[0] is verify.case}
    assert lengths == {1, 2, 40, 300, 4096, 65536}
    once = {(task[4]["T"], task[4]["HV"], task[4].get("draws", 1)) for task in tasks if task[0] is verify.case}
    assert once >= {(1, 2, verify.DRAWS), (1, 16, 1)}
    groups = verify.grouped(tasks)
    assert sum(map(len, groups)) == len(tasks) and len(groups) >= 27


def test_one_call_reaches_every_kernel(capsys):
    one_call.main("cpu", "float32")
    assert capsys.readouterr().out.splitlines()[-1] == "all: done"


@pytest.mark.parametrize(("code", "said", "ok"), [(0, "7.5", True), (0, "12", False), (-6, "7.5", False), (1, "", False)])
def test_a_first_call_that_aborts_is_not_ok_however_fast(code, said, ok):
    done = mock.Mock(returncode=code, stdout=said, stderr="terminate called")
    with mock.patch.object(verify.subprocess, "run", return_value=done):
        row = verify.first_call("kda")
    assert row["ok"] is ok and row["seconds"] == (f"{float(said):.1f}" if said else "inf")
