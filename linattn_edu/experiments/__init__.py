"""Small experiments that decide between rules: what a memory holds, forgets, overwrites; what training makes of it.

    >>> from linattn_edu import experiments
    >>> rows = experiments.run("capacity", seeds=[0, 1], dims=[16], loads=[1.0])
    >>> low, mean, high = experiments.spread(rows, "error", "memory")["additive"]
    >>> 0.8 < low < high < 1.1      # theory: (N - 1) / d = 15 / 16
    True

`python -m linattn_edu.experiments` lists them; `recorded(name)` reads the tables of three seeds that the book shows.
A row of a table is one measurement of one seed. What a docstring calls a result held for the seeds 0, 1 and 2.
"""

from linattn_edu.experiments.registry import EXPERIMENTS, find, recorded, run, settings, spread

__all__ = ["EXPERIMENTS", "find", "recorded", "run", "settings", "spread"]
