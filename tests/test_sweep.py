"""The recorded tables say what was measured and where, and come back as they were written."""

import torch

from linattn_edu import linear, softmax
from linattn_edu.bench import sweep


def test_a_table_comes_back_as_written(tmp_path):
    rows = sweep.sweep({"naive": softmax.parallel, "linear": linear.chunkwise}, [16, 64], K=8, V=8, budget=0, progress=False)
    assert [(row["form"], row["T"]) for row in rows] == [("naive", 16), ("naive", 64), ("linear", 16), ("linear", 64)]
    about = sweep.provenance("cpu", dtype="float32")
    sweep.write(tmp_path / "table.csv", rows, about)
    again, facts = sweep.read(tmp_path / "table.csv")
    assert again == rows and facts == {key: str(x) for key, x in about.items()}
    assert {"machine", "torch", "date", "command"} <= facts.keys()


def test_a_form_that_would_be_too_slow_is_left_out():
    rows = sweep.sweep({"naive": softmax.parallel}, [16, 32, 64], slowest=0.0, budget=0, progress=False)
    assert [row["T"] for row in rows] == [16]


def test_the_state_is_kept_in_the_same_bytes_after_any_context():
    rows = sweep.decode([128, 4096], K=64, V=64, budget=0, progress=False)
    held = {(row["form"], row["T"]): row["bytes"] for row in rows}
    assert held["linear, step", 128] == held["linear, step", 4096] == 4 * (64 * 64 + 64)
    assert held["softmax, SDPA over the cache", 4096] == 2 * 4096 * 64 * 4


def test_the_command_writes_its_table(tmp_path, monkeypatch):
    out = tmp_path / "decode.csv"
    monkeypatch.setattr("sys.argv", ["sweep", "--device", "cpu", "--longest", "256", "--decode", "--out", str(out)])
    sweep.main()
    rows, about = sweep.read(out)
    assert len(rows) == 4 and about["what"] == "decode" and about["torch"] == torch.__version__
    assert float(about["copy_bytes_a_second"]) > 1e8
