"""Run one experiment over several seeds and write its table; without a name, list them."""

import argparse
import inspect
import os
import shlex
import sys

import torch

from linattn_edu import experiments
from linattn_edu.experiments import registry


def listing():
    lines = (f"{name:16}{inspect.getdoc(experiments.find(name)).splitlines()[0]}" for name in experiments.EXPERIMENTS)
    return "\n".join(lines)


def main(argv=None):
    parser = argparse.ArgumentParser("python -m linattn_edu.experiments", description=__doc__)
    add = parser.add_argument
    add("name", nargs="?", choices=experiments.EXPERIMENTS)
    add("--seeds", type=int, nargs="+", default=[0])
    add("--setting", choices=["short", "gpu"], default="short")
    add("--out", help="a CSV file; the rows are printed without it")
    add("--workers", type=int, default=1, help="parts or seeds that run at a time")
    add("--threads", type=int, default=1, help="threads of torch")
    args = parser.parse_args(argv)
    if args.name is None:
        print(listing())
        return
    torch.set_num_threads(args.threads)
    before = _spent()
    rows = experiments.run(args.name, args.seeds, setting=args.setting, workers=args.workers)
    seconds = (_spent() - before) / len(args.seeds)
    print(f"{args.name}: {seconds:.0f} s of processor time a seed", file=sys.stderr)
    if args.out is None:
        for row in rows:
            print(*(f"{key} {x:.4g}" if isinstance(x, float) else f"{key} {x}" for key, x in row.items()), sep=", ")
    else:
        command = shlex.join(["python", "-m", "linattn_edu.experiments", *(sys.argv[1:] if argv is None else argv)])
        about = experiments.settings(args.name, args.setting) | {"cpu_seconds_per_seed": round(seconds, 1)}
        registry.record(args.out, rows, command=command, arguments=about)


def _spent():
    """Seconds of processor time, in user mode, of this process and of those that it waited for."""
    times = os.times()
    return times.user + times.children_user


if __name__ == "__main__":
    main()
