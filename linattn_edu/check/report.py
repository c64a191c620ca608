"""What a check found, and how it is said."""

import math
import textwrap
from dataclasses import dataclass, field

import torch

from linattn_edu.check.drawing import Setting
from linattn_edu.check.theorems import Theorem

WIDTH = 88
"""Columns of a line of a report: as many as a page of the book shows beside its menus."""


def wrapped(line):
    """The line, broken at spaces where it is wider than `WIDTH`; what follows stands two columns to the right."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True)
class Failure:
    """A theorem that fails: `words` say what was seen, `input` where; `kind` is "raises", "shape", "finite", "value"."""

    theorem: Theorem
    kind: str
    words: str
    deviation: float = math.inf
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
    printed: bool = False

    def __bool__(self):
        return not self.failures

    def __repr__(self):
        asked = len(self.held) + len(self.failures)
        return f"{self.name}: {len(self.held)} of {asked} theorems hold for {self.function}"

    def _ipython_display_(self):
        """As the last line of a notebook's cell: not once more what is already printed."""
        if not self.printed:
            print(self)

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
        return "\n".join(map(wrapped, lines))


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
