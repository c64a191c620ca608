"""`python -m linattn_edu.bench`: every form of every operator is timed, and its error stands beside its time."""

import argparse
import subprocess
import sys

import pytest
import torch

from linattn_edu import kda
from linattn_edu.bench import __main__ as bench
from linattn_edu.bench import record, rivals, rows


def table(*words):
    a = bench.parse([*words, "--device", "cpu", "--dtype", "float32", "--budget", "0"])
    return list(bench.table(a, "")), a


def test_a_shape_is_read_in_the_letters_of_the_book():
    assert bench.sizes_of("2x64x4x16") == {"B": 2, "T": 64, "H": 4, "K": 16, "V": 16, "HV": 4}
    assert bench.sizes_of("2x64x4x16x32x8") == {"B": 2, "T": 64, "H": 4, "K": 16, "V": 32, "HV": 8}
    for wrong in ("2x64x4", "0x64x4x16", "1x1x1x1x1x1x1"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"got '{wrong}', expected BxTxHxK"):
            bench.sizes_of(wrong)


def test_every_operator_has_its_rows():
    found, _ = table("--shapes", "2x70x2x8", "--passes", *bench.PASSES, "--forms", *bench.FORMS)
    seen = {(r["op"], r["form"], r["pass"]) for r in found}
    for op in bench.OPS:
        own = set(bench.OWN) - ({"fused"} if op == "softmax" else set())
        assert {(op, form, name) for form in own for name in bench.PASSES[:2]} <= seen
    steps = {op for op, form, name in seen if (form, name) == ("step", "decode")}
    assert steps == set(bench.OPS) - {"softmax"} and ("softmax", "SDPA", "decode") in seen
    for r in found:
        if r["form"] != "FLA":
            assert not r["note"] and float(r["wall_low"]) <= float(r["wall_ms"]) <= float(r["wall_high"]), r
            assert r["device_ms"] == "" and float(r["peak_MiB"]) >= 0
            assert r["form"] == "copy" or (r["op"], r["pass"]) == ("softmax", "decode") or 0 <= float(r["error"]) < 1e-5, r


def test_grouped_heads_and_unequal_widths():
    found, _ = table("--shapes", "1x40x2x8x12x4", "--ops", "kda", "gla", "--forms", "chunkwise", "step", "--passes", *bench.PASSES)
    assert len(found) == 6 and all(float(r["error"]) < 1e-5 for r in found)


@pytest.mark.parametrize("slip", [lambda o: 1.01 * o, lambda o: torch.where(torch.arange(o.shape[1])[:, None, None] < 60, o, 0.0)])
def test_a_wrong_form_shows_its_error(monkeypatch, slip):
    right = kda.chunkwise

    def wrong(**a):
        o, state = right(**a)
        return slip(o), state

    monkeypatch.setattr(rows, "form_of", lambda op, form: wrong if form == "parallel" else right)
    found, _ = table("--shapes", "1x70x2x8", "--ops", "kda", "--forms", "parallel", "chunkwise")
    errors = {(r["form"], r["pass"]): float(r["error"]) for r in found}
    assert all(errors["parallel", name] > 5e-3 and errors["chunkwise", name] < 1e-5 for name in bench.PASSES[:2])


def test_a_wrong_step_shows_its_error(monkeypatch):
    right = kda.step
    monkeypatch.setattr(kda, "step", lambda **a: right(**a | ({"g": 0 * a["g"]} if "backend" not in a else {})))
    found, _ = table("--shapes", "1x1x2x8", "--ops", "kda", "--passes", "decode", "--forms", "step", "step in PyTorch")
    errors = {r["form"]: float(r["error"]) for r in found}
    assert errors["step"] > 1e-3 and errors["step in PyTorch"] < 1e-6


def test_what_a_rival_raises_is_written_down(monkeypatch):
    def refuse(table, name):
        def call(**a):
            raise RuntimeError("no driver\nfor this")

        return call

    monkeypatch.setattr(rivals, "fla", refuse)
    found, _ = table("--shapes", "1x8x1x4", "--ops", "gla", "--forms", "FLA", "--passes", *bench.PASSES)
    assert [r["note"] for r in found] == ["RuntimeError: no driver"] * 3 and all(not r["wall_ms"] for r in found)
    assert "RuntimeError: no driver" in bench.line(found[0])


def test_forms_that_would_take_everything_are_left_out(monkeypatch):
    monkeypatch.setitem(rows.LONGEST, "parallel", 16)
    found, _ = table("--shapes", "1x16x1x4", "1x17x1x4", "--ops", "linear", "--forms", "parallel", "--passes", "forward")
    assert [r["T"] for r in found] == [16]


def test_every_rival_is_a_function_of_ours_by_name():
    assert set(rivals.CHUNK) == set(rivals.DECODE) == set(bench.OPS) - {"softmax", "mamba"}
    q, k, v = torch.randn(3, 1, 9, 2, 4).unbind()
    o, _ = rivals.sdpa(q, k, v)
    torch.testing.assert_close(o, rows.MODULES["softmax"].recurrent(q, k, v)[0])


def test_a_call_for_its_compilation_alone_is_made_once(monkeypatch):
    calls = []
    monkeypatch.setattr(rows, "form_of", lambda op, form: lambda **a: calls.append(form) or (a["v"] * a["q"] * a["k"], None))
    s = bench.sizes_of("1x8x1x4")
    [row] = bench.measured_at(s, "linear", ["fused"], ["forward"], torch.float32, torch.device("cpu"), None, "")
    assert calls == ["fused"] and not row["wall_ms"] and not row["note"]
    [row] = bench.measured_at(s, "kda", ["step"], ["decode"], torch.float32, torch.device("cpu"), None, "")
    assert not row["wall_ms"] and not row["note"]


def test_kernels_are_compiled_before_anything_is_timed():
    """Here, where nothing compiles: the process starts, makes every call and ends."""
    words = ["--shapes", "1x8x1x4", "--ops", "linear", "--forms", "fused", "step", "--passes", "forward", "decode"]
    a = bench.parse([*words, "--device", "cpu"])
    bench.compile_side_by_side(1, a.ops, a.forms, a.shapes, a.passes, a.dtype, a.device)


def test_the_command_writes_table_and_figure(tmp_path, capsys):
    out, figure = tmp_path / "table.csv", tmp_path / "figures" / "table.png"
    words = ["--shapes", "1x16x1x4", "--ops", "linear", "kda", "--passes", "forward", "decode", "--budget", "0"]
    bench.main([*words, "--device", "cpu", "--out", str(out), "--plot", str(figure)])
    found, about = record.read(out)
    assert {"machine", "torch", "date", "command", "dtype", "product_flops_a_second"} <= about.keys()
    assert [r["op"] for r in found] == ["linear"] * 4 + ["kda"] * 4
    assert figure.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert about["machine"] in printed and printed.count("chunkwise") == 2


def test_a_figure_without_matplotlib_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench, "table", lambda *_: pytest.fail("measures"))
    with pytest.raises(ImportError, match=r'--plot needs matplotlib: pip install "linattn_edu\[viz\]"'):
        bench.main(["--shapes", "1x8x1x4", "--device", "cpu", "--plot", str(tmp_path / "table.png")])


@pytest.mark.parametrize("module", ["__main__", "cpu", "sweep"])
def test_without_tqdm_a_benchmark_says_what_to_install(module):
    code = f"import sys; sys.modules['tqdm'] = None; import linattn_edu.bench.{module}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'a benchmark needs tqdm: pip install "linattn_edu[train]"' in run.stderr


def test_a_recorded_command_is_quoted(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench", "--out", "my table.csv"])
    assert record.provenance("cpu")["command"] == "python -m bench --out 'my table.csv'"
