"""From theorems to a verdict in words: which hold, which fail, on how small an input, and for which likely reason."""

from dataclasses import dataclass, field, replace

import torch

from linattn_edu.check.diagnosis import likely_slip
from linattn_edu.check.drawing import Setting
from linattn_edu.check.problems import problems
from linattn_edu.check.reader import Reader, Stop
from linattn_edu.check.theorems import THEOREMS, Theorem, comparisons

ARGUMENTS = Theorem("arguments", "It takes the arguments of the operator", None)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
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


@dataclass(frozen=True)
class Failure:
    """A theorem that fails. `kind` is "raises", "shape", "finite" or "value"; `words` say what was seen on `setting`."""

    theorem: Theorem
    kind: str
    words: str
    setting: Setting | None = None
    input: str = ""


@dataclass
class Report:
    """The outcome of a check, true if every theorem that could be tested holds.

    `held` are theorems, `failures` have a theorem each, `not_tested` maps theorems to reasons, `slip` is "" if unknown.
    """

    name: str
    function: str
    held: list = field(default_factory=list)
    failures: list = field(default_factory=list)
    not_tested: dict = field(default_factory=dict)
    slip: str = ""

    def __bool__(self):
        return not self.failures

    def __repr__(self):
        return f"{self.name}: {len(self.held)} of {len(self.held) + len(self.failures)} theorems hold for {self.function}"

    def __str__(self):
        lines = [repr(self), *(f"✓ {theorem.sentence}" for theorem in self.held)]
        wrong, said = any(failure.theorem.key == "value" for failure in self.failures), set()
        for failure in self.failures:
            lines.append(f"✗ {failure.theorem.sentence}")
            follows = wrong and failure.theorem.key not in ("value", "causal") or failure.words in said
            said.add(failure.words)
            if not follows:
                lines.append(f"    {failure.words}")
                lines += [f"    on the input {failure.input}"] if failure.input else []
        for reason in dict.fromkeys(self.not_tested.values()):
            keys = ", ".join(theorem.key for theorem, given in self.not_tested.items() if given == reason)
            lines.append(f"- not tested, since {reason}: {keys}")
        if self.slip:
            lines.append(f"Likely slip: your function equals the version that {self.slip}.")
        return "\n".join(lines)


def judge(name, function, options, skip=(), heads=True):
    """Ask every theorem of a function; diagnose it if one fails."""
    found = problems()
    if name not in found:
        raise ValueError(f"`name`: got {name!r}, expected one of {', '.join(found)}")
    problem = found[name].with_options(options)
    if not heads:
        problem = problem.with_one_head()
    report = Report(name, f"`{getattr(function, '__name__', type(function).__name__)}`")
    try:
        run = Reader(problem, function, heads=heads)
    except Stop as stop:
        report.failures.append(Failure(ARGUMENTS, "raises", f"your function {stop}"))
        return report
    base = problem.base(run.takes("chunk_size"))
    if not heads:
        base = replace(base, B=1, H=1, HV=1)
    run.returned = returned(run, base)
    failing = []
    for theorem in THEOREMS:
        if set(theorem.needs.split()) <= problem.traits:
            failing += ask(theorem, run, base, report, skip)
        if theorem.key == "shapes" and report.failures:
            break
    if report.failures:
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
        return "your function has no argument " + " and no argument ".join(f"`{name}`" for name in lacking)
    if theorem.returns_state and len(run.returned) < 2:
        return "your function returns no state"
    return ""


def failed(theorem, run, setting):
    """The failure of a theorem on one input, or None: the worst of its comparisons."""
    seen = comparisons(theorem, run, setting)
    if isinstance(seen, Stop):
        kind, words = "raises", f"your function {seen}"
    else:
        worst = max(filter(None, (difference(c, TOLERANCE[setting.dtype]) for c in seen)), key=lambda d: d[2], default=None)
        if worst is None:
            return None
        kind, words, _ = worst
    return Failure(theorem, kind, words, setting, described(run.problem, setting))


def difference(c, tolerance):
    """Kind, words and size of the difference between what came and what is true; None where there is none."""
    if not isinstance(c.got, torch.Tensor):
        return None if c.got == c.expected else ("shape", f"{c.what} is {c.got}, expected {c.expected}", torch.inf)
    if c.got.shape != c.expected.shape:
        return "shape", f"{c.what} has the shape {list(c.got.shape)}, expected {list(c.expected.shape)}", torch.inf
    got, expected = c.got.detach().double(), c.expected.detach().double()
    off = (got - expected).abs() / (1 + expected.abs())
    off = torch.where((got == expected) | (got.isnan() & expected.isnan()), 0, off.nan_to_num(torch.inf))
    if off.numel() == 0 or off.max() <= tolerance:
        return None
    at = [int(i) for i in torch.unravel_index(off.argmax(), off.shape)]
    pair = [x[tuple(at)].item() + 0.0 for x in (got, expected)]
    here, true = next(shown for shown in ([f"{x:.{n}g}" for x in pair] for n in (3, 6, 9, 12, 17)) if shown[0] != shown[1])
    kind = "value" if off.max() < torch.inf else "finite"
    largest = f" (largest deviation {(got - expected).abs().max().item():.1e})" if kind == "value" else ""
    return kind, f"{c.what} is {here} at {at}, expected {true}{largest}", off.max().item()


def smallest(theorem, run, failure, known):
    """Make the failing input smaller, one size after another, as long as it fails in the same way.

    A small input that is `known` to make another theorem fail is tried first.
    """
    for sizes in known:
        changed = replace(failure.setting, **{x: getattr(sizes, x) for x in ("B", "T", "H", "HV", "K", "V", "chunk_size")})
        smaller = None if failure.setting.lengths or failure.setting.T == 0 else failed(theorem, run, changed)
        if smaller and smaller.kind == failure.kind:
            return smaller
    for size, candidates in SMALLER.items():
        for candidate in candidates:
            changed = shrunk(failure.setting, size, candidate)
            smaller = changed and failed(theorem, run, changed)
            if smaller and smaller.kind == failure.kind:
                failure = smaller
                break
    return failure


def shrunk(setting, size, value):
    """The setting with a smaller value for one size; None where that is not smaller."""
    if size == "heads":
        H, HV = value
        return replace(setting, H=H, HV=HV) if (H, HV) < (setting.H, setting.HV) and HV <= setting.HV else None
    now = getattr(setting, size)
    if size == "lengths":
        return replace(setting, lengths=value) if now and value != now else None
    if size == "regime":
        return replace(setting, regime=value) if now not in ("zero", value) else None
    return replace(setting, **{size: value}) if now and value < now else None


def described(problem, setting):
    """The input in letters: B = 1, T = 2, ..."""
    letters = [x.rpartition(":") for x in problem.letters.split() if not (setting.lengths and x in "BT")]
    sizes = [f"{x or attribute} = {getattr(setting, attribute)}" for x, _, attribute in letters]
    if setting.lengths:
        sizes.append(f"packed sequences of {', '.join(map(str, setting.lengths))} tokens")
    if setting.chunk_size:
        sizes.append(f"chunk_size = {setting.chunk_size}")
    if "g" in problem.traits:
        sizes.append(f"{setting.regime} gates")
    if setting.state and "state" in problem.traits:
        sizes.append("with an initial state")
    sizes += [f"{key} = {value!r}" for key, value in setting.options]
    return ", ".join(sizes) + (", float32" if setting.dtype == torch.float32 else "")
