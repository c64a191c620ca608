"""One-symbol slips planted in the package's own source: each is caught by the theorems and named by the checker."""

import sys

import pytest
import torch
from torch.nn.functional import logsigmoid

import linattn_edu
from linattn_edu.check import check
from linattn_edu.check.copies import Copy, source
from linattn_edu.check.mutants import MUTANTS, Mutant, copy_of


def label(mutant):
    return f"{mutant.module}.{mutant.function}: {mutant.slip}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=label)
def test_a_slip_is_caught_and_named(mutant):
    report = check(mutant.seen_in, copy_of(mutant).function(mutant.seen_in), quiet=True)
    assert report.failures
    assert report.slip == mutant.slip, str(report)


def test_every_slip_fits_one_place():
    assert len(MUTANTS) >= 45 and len(set(MUTANTS)) == len(MUTANTS)
    for mutant in MUTANTS:
        assert mutant.source() != source(mutant.module)
    with pytest.raises(ValueError, match="linear.inter: 'S' occurs 3 times, expected once"):
        Mutant("linear", "inter", "linear.inter", "S", "s", "").source()


def test_every_variant_has_slips():
    assert {mutant.module for mutant in MUTANTS} >= {*linattn_edu.VARIANTS, "mamba", "short_conv", "gates"}


def test_a_copy_without_a_slip_passes_in_short_segments():
    for name in (f"{variant}.{form}" for variant in linattn_edu.VARIANTS for form in ("recurrent", "chunkwise")):
        report = check(name, Copy().function(name), quiet=True)
        assert report and not report.not_tested, str(report)


def test_mutants_leave_the_package_alone():
    before = dict(sys.modules)
    mutant = next(m for m in MUTANTS if m.module == "algebra")
    copy = Copy(mutant)
    assert copy.function("decay.recurrent") is not linattn_edu.decay.recurrent
    assert copy.modules["algebra"] is not linattn_edu.algebra
    assert dict(sys.modules) == before


def usual(gate, state=False, positive=True, T=256, d=16):
    """Inputs of the kind that test files of linear attention draw: positive keys, zero state, gates as given."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, 2, d, generator=draw, dtype=torch.float64) for _ in "qkv")
    if positive:
        q, k = q.abs(), k.abs()
    g = gate(torch.randn(1, T, 2, generator=draw, dtype=torch.float64))
    beta = torch.rand(1, T, 2, generator=draw, dtype=torch.float64)
    S = torch.randn(1, 2, d, d, generator=draw, dtype=torch.float64) if state else None
    return dict(q=q, k=linattn_edu.l2norm(k), v=v, g=g, beta=beta, initial_state=S)


def error(slip, arguments):
    """Relative root-mean-square error that a slip in Gated DeltaNet's chunkwise form makes in the output."""
    [mutant] = [m for m in MUTANTS if m.seen_in == "gated_deltanet.chunkwise" and m.slip == slip]
    expected, _ = linattn_edu.gated_deltanet.chunkwise(**arguments)
    got, _ = copy_of(mutant).function("gated_deltanet.chunkwise")(**arguments)
    return ((got - expected).square().mean() / expected.square().mean()).sqrt().item()


USUAL, SIGNED, WEAK, OPEN = "usual", "signed", "weak", "open"
INPUTS = {
    USUAL: dict(gate=logsigmoid),
    SIGNED: dict(gate=logsigmoid, positive=False),
    WEAK: dict(gate=lambda x: -0.01 * x.sigmoid(), positive=False, state=True),
    OPEN: dict(gate=torch.zeros_like, positive=False, state=True),
}
INVISIBLE = {
    "hands on the state of the last block alone": {USUAL, SIGNED},
    "uses the causal mask where the decay mask belongs": {OPEN},
    "leaves the decay out of the triangular system": {OPEN},
    "writes the block into the state without the decay up to its end": {OPEN},
    "leaves the decay out of W": {OPEN},
}


@pytest.mark.parametrize("slip", INVISIBLE)
def test_usual_inputs_do_not_see_every_slip(slip):
    """Gates drawn as logsigmoid(randn) are -0.8 on average: a block of 64 tokens keeps e^-52 of its incoming state."""
    errors = {name: error(slip, usual(**how)) for name, how in INPUTS.items()}
    assert {name for name, x in errors.items() if x < 1e-12} == INVISIBLE[slip], errors
    assert errors[WEAK] > 1e-3, errors
