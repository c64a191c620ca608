"""Naming a slip: which mutant of the package gives the same wrong results as the reader's function?"""

from functools import partial

import torch

from linattn_edu.check.mutants import candidates, copy_of
from linattn_edu.check.reader import Stop
from linattn_edu.check.theorems import comparisons

CLOSE = {torch.float64: 1e-7, torch.float32: 1e-3}


def likely_slip(run, failing, holding):
    """The slip of the first mutant that equals the function wherever it gives a result, or "".

    `failing` and `holding` are pairs (theorem, setting) on which the function fails and holds. The former, the smallest
    first, tell mutants apart fastest.
    """
    if all(isinstance(comparisons(*at(run, pair)), Stop) for pair in failing):
        return ""
    for mutant in candidates(run.problem.name):
        for twin in twins(run, copy_of(mutant).function(run.problem.name)):
            if all(agree(run, twin, pair) for pair in [*failing, *holding]):
                return mutant.slip
    return ""


def twins(run, function):
    """A mutant's function, read like the reader's; with the usual chunk sizes if the reader's has one of its own."""
    if "chunk_size" in run.problem.traits and not run.takes("chunk_size"):
        return [run.like(partial(function, chunk_size=C)) for C in (64, 32, 16, 8, 4, 2)]
    return [run.like(function)]


def at(run, pair):
    theorem, setting = pair
    return theorem, run, setting


def agree(run, twin, pair):
    """Whether two functions give a theorem the same to look at; where the reader's raises, nothing is known."""
    mine, other = comparisons(*at(run, pair)), comparisons(*at(twin, pair))
    if isinstance(mine, Stop) or isinstance(other, Stop):
        return isinstance(mine, Stop)
    return len(mine) == len(other) and all(close(x.got, y.got) for x, y in zip(mine, other))


def close(x, y):
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return type(x) is type(y) and x == y
    near = CLOSE.get(x.dtype, 1e-2)
    return x.shape == y.shape and x.dtype == y.dtype and torch.allclose(x, y, near, near, equal_nan=True)
