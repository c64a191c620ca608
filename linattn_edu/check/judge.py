"""From theorems to a verdict in words: which hold, which fail, on how small an input, and for which likely reason."""

from dataclasses import replace

import torch

from linattn_edu import validate
from linattn_edu.check.diagnosis import likely_slip
from linattn_edu.check.one_head import without_heads
from linattn_edu.check.problems import problems
from linattn_edu.check.reader import Reader, Stop
from linattn_edu.check.report import Failure, Report, described
from linattn_edu.check.theorems import THEOREMS, Theorem, comparisons

ARGUMENTS = Theorem("arguments", "It takes the arguments of the operator", None)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
PLAIN = 0.01
"""A relative deviation that nobody takes for rounding."""
SMALLER = {
    "chunk_size": (1, 2),
    "lengths": ((1,), (0, 1), (1, 1), (2, 1)),
    "T": (1, 2, 3, 4, 5, 8, 9, 16, 17, 33),
    "B": (1,),
    "heads": ((1, 1), (1, 2), (2, 2), (2, 4)),
    "K": (1, 2),
    "V": (1, 2),
    "regime": ("zero", "weak"),
}


def judge(name, function, options, skip=(), heads=True, hints=True):
    """Ask every theorem of a function; diagnose it if one fails."""
    found = problems()
    if name not in found:
        raise ValueError(f"`name`: got {name!r}, expected one of {', '.join(found)}")
    if not callable(function):
        raise TypeError(f"`function`: got {validate.describe(function)}, expected a function")
    skip = [skip] if isinstance(skip, str) else list(skip)
    validate.names("skip", skip, [theorem.key for theorem in THEOREMS])
    problem = found[name].with_options(options)
    if not heads:
        problem = without_heads(problem)
    report = Report(name, f"`{getattr(function, '__name__', type(function).__name__)}`")
    try:
        run = Reader(problem, function)
    except Stop as stop:
        report.failures.append(Failure(ARGUMENTS, "raises", f"your function {stop}"))
        return report
    base = problem.base(run.takes("chunk_size"))
    run.returned = returned(run, base)
    failing = []
    for theorem in THEOREMS:
        if set(theorem.needs.split()) <= problem.traits:
            failing += ask(theorem, run, base, report, skip)
        if theorem.key == "shapes" and report.failures:
            break
    if report.failures and hints:
        failing = [(failure.theorem, failure.setting) for failure in report.failures] + failing
        holding = [(theorem, setting) for theorem in report.held for setting in theorem.settings(base)]
        report.slip = likely_slip(run, failing, holding)
    return report


def returned(run, base):
    """The names of the results that a function returns, in order: a set would make reports differ from run to run."""
    try:
        return tuple(run(run.problem.arguments(base)))
    except Stop:
        return tuple(run.problem.results)


def ask(theorem, run, base, report, skip):
    """Enter one theorem in the report; return it with the input on which it first fails, if it does."""
    reason = why_not(theorem, run, skip)
    if reason:
        report.not_tested[theorem] = reason
        return []
    failures = (failed(theorem, run, setting) for setting in theorem.settings(base))
    failure = next(filter(None, failures), None)
    if failure is None:
        report.held.append(theorem)
    elif theorem.key == "groups" and failure.kind == "raises" and not run.takes("initial_state"):
        report.not_tested[theorem] = "your function wants as many heads in `v` as in `q` and `k`"
    else:
        report.failures.append(smallest(theorem, run, failure, [f.setting for f in report.failures]))
        return [(theorem, failure.setting)]
    return []


def why_not(theorem, run, skip):
    """Why a theorem cannot be tested on a function, in words."""
    if theorem.key in skip:
        return "the exercise does not ask for it"
    lacking = [name for name in theorem.takes.split() if not run.takes(name)]
    if lacking:
        return f"your function has no argument `{lacking[0]}`"
    if theorem.returns_state and len(run.returned) < 2:
        return "your function returns no state"
    return ""


def failed(theorem, run, setting):
    """The failure of a theorem on one input, or None: the worst of its comparisons."""
    seen = comparisons(theorem, run, setting)
    if isinstance(seen, Stop):
        kind, words, deviation = "raises", f"your function {seen}", torch.inf
    else:
        differences = filter(None, (difference(c, TOLERANCE[setting.dtype]) for c in seen))
        kind, words, deviation = max(differences, key=lambda d: d[2], default=(None, None, None))
    if kind is None:
        return None
    return Failure(theorem, kind, words, deviation, setting, described(run.problem, setting))


def difference(c, tolerance):
    """Kind, words and size of the difference between what came and what is true; None where there is none."""
    if not isinstance(c.got, torch.Tensor):
        return None if c.got == c.expected else ("shape", f"{c.what} is {c.got}, expected {c.expected}", torch.inf)
    if c.got.shape != c.expected.shape:
        return "shape", f"{c.what} has the shape {list(c.got.shape)}, expected {list(c.expected.shape)}", torch.inf
    got, expected = (x.detach().double().cpu() for x in (c.got, c.expected))
    off = (got - expected).abs() / (1 + expected.abs())
    off = torch.where((got == expected) | (got.isnan() & expected.isnan()), 0, off.nan_to_num(torch.inf))
    if off.numel() == 0 or off.max() <= tolerance:
        return None
    at = [int(i) for i in torch.unravel_index(off.argmax(), off.shape)]
    pair = [x[tuple(at)].item() + 0.0 for x in (got, expected)]
    shown = ([f"{x:.{n}g}" for x in pair] for n in (3, 6, 9, 12, 17))
    here, true = next((x, y) for x, y in shown if x != y)
    kind = "value" if off.max() < torch.inf else "finite"
    largest = f" (largest deviation {(got - expected).abs().max().item():.1e})" if kind == "value" else ""
    return kind, f"{c.what} is {here} at {at}, expected {true}{largest}", off.max().item()


def smallest(theorem, run, failure, known):
    """Make the failing input smaller, one size after another, as long as it fails alike.

    A small input that is `known` to make another theorem fail is tried first.
    """
    fields = ("B", "T", "H", "HV", "K", "V", "chunk_size")
    for sizes in dict.fromkeys(tuple(getattr(setting, x) for x in fields) for setting in known):
        changed = replace(failure.setting, **dict(zip(fields, sizes)))
        smaller = None if failure.setting.lengths or failure.setting.T == 0 else failed(theorem, run, changed)
        if alike(smaller, failure):
            return smaller
    for size, candidates in SMALLER.items():
        for candidate in candidates:
            changed = shrunk(failure.setting, size, candidate)
            smaller = changed and failed(theorem, run, changed)
            if alike(smaller, failure):
                failure = smaller
                break
    return failure


def alike(smaller, failure):
    """Whether a theorem fails on the smaller input too, in the same way and as plainly."""
    plain = min(failure.deviation, PLAIN)
    return bool(smaller) and smaller.kind == failure.kind and smaller.deviation >= plain


def shrunk(setting, size, value):
    """The setting with a smaller value for one size; None where that is not smaller."""
    if size == "heads":
        H, HV = value
        smaller = (H, HV) < (setting.H, setting.HV) and HV <= setting.HV
        grouped_anew = H < HV and setting.H == setting.HV
        return replace(setting, H=H, HV=HV) if smaller and not grouped_anew else None
    now = getattr(setting, size)
    if size == "lengths":
        return replace(setting, lengths=value) if now and value != now else None
    if size == "regime":
        return replace(setting, regime=value) if now not in ("zero", value) else None
    return replace(setting, **{size: value}) if now and value < now else None
