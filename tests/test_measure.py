"""Memory is counted to the byte; time is that of the call."""

import subprocess
import sys
import time

import torch

from linattn_edu import linear, softmax
from linattn_edu.bench.ceilings import ceilings, launch_seconds
from linattn_edu.bench.measure import Times, peak_bytes, seconds


def test_peak_is_the_sum_of_what_is_held_together():
    def f():
        a = torch.empty(1000, dtype=torch.float32)
        b = torch.empty(2000, dtype=torch.float32)
        del a, b
        return torch.empty(500, dtype=torch.float32)

    assert [peak_bytes(f) for _ in range(3)] == [12000, 12000, 12000]
    assert peak_bytes(lambda: torch.empty(2**20, dtype=torch.uint8)) == 2**20


def test_measuring_writes_nothing():
    code = "import torch; from linattn_edu.bench.measure import peak_bytes; peak_bytes(lambda: torch.ones(9))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_score_matrix_is_quadratic_and_the_state_is_not():
    def peak(form, T):
        q, k, v = (torch.randn(1, T, 1, 64) for _ in range(3))
        return peak_bytes(lambda: form(q, k, v))

    assert peak(softmax.parallel, 1024) > 2 * 4 * 1024**2
    assert 3.7 < peak(softmax.parallel, 2048) / peak(softmax.parallel, 1024) < 4.1
    assert peak(linear.chunkwise, 2048) / peak(linear.chunkwise, 1024) < 2.1


def test_time_is_that_of_the_call():
    t = seconds(lambda: time.sleep(0.01), at_least=5, budget=0)
    assert 0.01 <= t.low <= t.median <= t.high < 0.1 and t.calls == 5


def test_ceilings_are_rates_of_bytes_and_flops(monkeypatch):
    """With a clock that gives every call a millisecond: twice the bytes of a copy, 2 n^3 FLOPs of a product."""
    monkeypatch.setattr("linattn_edu.bench.ceilings.seconds", lambda f, **_: Times(1e-3, 1e-3, 1e-3, 1))
    found = ceilings()
    assert float(found["copy_bytes_a_second"]) == float(f"{2 * 2**28 * 1e3:.4g}")
    assert float(found["product_flops_a_second"]) == float(f"{2 * 1024**3 * 1e3:.4g}")


def test_a_launch_is_shorter_than_a_product():
    x = torch.randn(512, 512)
    assert 0 < launch_seconds() < seconds(lambda: x @ x).median
