"""What the kernels ask of the GPUs that readers have, as a table that `doctor` reads without compiling anything.

    python -m linattn_edu.kernels.fitness

compiles all kernels for all of them (minutes) and writes the table; to be repeated when a kernel or its tiles change.
"""

import argparse
import itertools
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from linattn_edu.extras import need

TABLE = Path(__file__).with_name("fitness.json")
CAPABILITIES = ((7, 5), (8, 0), (8, 6), (9, 0))
"""One for each choice of tiles: 8.9 is configured like 8.6, 10.0 like 9.0."""

DTYPES = ("float32", "float16", "bfloat16")


def read():
    """`(versions and sizes, rows)`: a row is the most that a family of kernels asks for, for a capability and dtype."""
    table = json.loads(TABLE.read_text())
    return table["about"], table["rows"]


def rows_for(capability, rows):
    """The rows of the newest recorded architecture that is not newer, and its capability; none before the oldest."""
    known = [tuple(row["capability"]) for row in rows if tuple(row["capability"]) <= tuple(capability)]
    return (max(known), [row for row in rows if tuple(row["capability"]) == max(known)]) if known else (None, [])


def measure(capability, dtype):
    """The rows of a capability and dtype, compiled now."""
    from linattn_edu.kernels.compiling import FAMILIES, compile_all

    rows = []
    for family in FAMILIES:
        records = compile_all(capability, [getattr(torch, dtype)], families=[family])
        rows.append({
            "capability": capability, "dtype": dtype, "kernels": family,
            "shared_bytes": max(r.shared_bytes for r in records), "registers": max(r.registers for r in records),
            "spilled_bytes": max(r.spilled_bytes for r in records),
        })  # fmt: skip
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    a = parser.parse_args()
    import triton

    tqdm = need("tqdm", "the bar").tqdm
    tasks = [x for x in itertools.product(CAPABILITIES, DTYPES) if x[1] != "bfloat16" or x[0] >= (8, 0)]
    with ProcessPoolExecutor(a.jobs, multiprocessing.get_context("spawn")) as pool:
        rows = [row for rows in tqdm(pool.map(measure, *zip(*tasks)), total=len(tasks)) for row in rows]
    lines = ",\n".join(json.dumps(row) for row in rows)
    about = json.dumps({"triton": triton.__version__, "K": 128, "V": 128})
    TABLE.write_text(f'{{"about": {about}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
