"""The table of what the kernels ask of a GPU is that of these kernels."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from linattn_edu import kernels
from linattn_edu.kernels import fitness

ABOUT, ROWS = fitness.read()


def test_every_device_dtype_and_family_has_a_row():
    seen = {(*row["capability"], row["dtype"], row["kernels"]) for row in ROWS}
    families = {"chunk", "step", "scan"}
    expected = {(*c, dtype, family) for c in fitness.CAPABILITIES for dtype in fitness.DTYPES for family in families}
    assert seen == {x for x in expected if x[:2] != (7, 5) or x[2] != "bfloat16"}


def test_what_is_recorded_fits():
    limit = {(7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (9, 0): 232448}
    for row in ROWS:
        assert 0 < row["shared_bytes"] <= limit[tuple(row["capability"])] and row["spilled_bytes"] <= 2048, row


def test_the_nearest_older_device_stands_in():
    assert fitness.rows_for((8, 9), ROWS)[0] == (8, 6) and fitness.rows_for((12, 0), ROWS)[0] == (9, 0)
    assert fitness.rows_for((7, 0), ROWS) == (None, [])


@pytest.mark.skipif(kernels.mode() == "missing", reason="no Triton on this system")
def test_the_table_is_that_of_these_kernels(root, tmp_path):
    """A sample: no kernel asks for more than its row says, and the largest of the step's kernels for as much."""
    if version("triton") != ABOUT["triton"]:
        pytest.skip(f"the table was made with Triton {ABOUT['triton']}")
    program = (
        "import torch; from linattn_edu.kernels import compile_all, fitness\n"
        "row = {r['kernels']: r for r in fitness.read()[1] if r['capability'] == [9, 0] and r['dtype'] == 'bfloat16'}\n"
        "advice = 'kernels have changed: python -m linattn_edu.kernels.fitness'\n"
        "def most(**more):\n"
        "    records = compile_all((9, 0), [torch.bfloat16], **more)\n"
        "    return max(r.shared_bytes for r in records), max(r.spilled_bytes for r in records)\n"
        "shared, spilled = most(variants=[('scalar', True)], families=['chunk'])\n"
        "assert shared <= row['chunk']['shared_bytes'] and spilled <= row['chunk']['spilled_bytes'], advice\n"
        "assert most(families=['step']) == (row['step']['shared_bytes'], row['step']['spilled_bytes']), advice\n"
    )
    environment = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
