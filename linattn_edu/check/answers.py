"""Numeric answers, checked without standing anywhere: `answers.json` keeps a salted hash of each.

To add one, from the root of the repository:

    python -m linattn_edu.check softmax.cache_bytes 2048 --slip 1024 "counts the keys alone"

An answer is a number, a word, or several of them. A number with `--digits 3` is compared to 3 significant digits, one
unit of the last included; without, it must be exact. A slip is a wrong answer worth a sentence of its own.
"""

import hashlib
import itertools
import json
import math
import sys
from numbers import Real
from pathlib import Path

from linattn_edu.check.report import wrapped
from linattn_edu.validate import describe

TABLE = Path(__file__).with_name("answers.json")
FACTORS = {
    -1: "the sign",
    2: "a factor of 2",
    8: "a factor of 8 (bits and bytes?)",
    100: "a factor of 100 (percent?)",
    1024: "a factor of 1024",
}


def answers():
    """The table: for each exercise its digits, and the hashes of its answer and of foreseen slips."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def check_answer(name, value, *, quiet=False):
    """Compare an answer with the hash kept for the exercise `name`, and say whether it is right.

    Of a wrong one it says what is known: a foreseen slip, another order, a wrong sign, a usual factor. `value` is a
    number, a word or a list of them; anything else raises `TypeError`. Returns True or False; an unknown name raises
    `ValueError`.
    """
    table = answers()
    if name not in table:
        raise ValueError(f"`name`: got {name!r}, expected one of {', '.join(table)}")
    entry, values = table[name], listed(value)
    right = matches(name, values, entry["digits"], entry["answer"])
    if not quiet:
        precision = f" to {entry['digits']} significant digits" if entry["digits"] else ""
        verdict = f"right{precision}" if right else f"not right{precision}{remark(name, values, entry)}"
        print(wrapped(f"{'✓' if right else '✗'} {name}: {verdict}."))
    return right


def remark(name, values, entry):
    """What is known of a wrong answer: a slip that was foreseen, another order, or a usual factor."""
    for known, words in entry["slips"].items():
        if matches(name, values, entry["digits"], known):
            return f": it {words}"
    if any(matches(name, order, entry["digits"], entry["answer"]) for order in itertools.permutations(values)):
        return ": it is right in another order"
    numbers = [x for x in values if not isinstance(x, str)]
    for factor, words in FACTORS.items() if len(numbers) == len(values) else ():
        for f in (factor, 1 / factor):
            if any(numbers) and matches(name, [f * x for x in numbers], entry["digits"], entry["answer"]):
                return f": it is off by {words}"
    return ""


def matches(name, values, digits, known):
    """Whether the values, each up to one unit of its last digit, have the hash `known`."""
    return any(hashed(name, texts) == known for texts in itertools.product(*(spellings(x, digits) for x in values)))


def spellings(x, digits):
    """The ways to round a number that count as equal; a word as it is."""
    if isinstance(x, str) or not digits:
        return {spelling(x, digits)}
    half = 0.5 * 10.0 ** (int(f"{float(x):e}".partition("e")[2]) + 1 - digits) if math.isfinite(x) else 0
    return {spelling(float(x) + e, digits) for e in (-half, 0, half)}


def spelling(x, digits):
    """The text of an answer: a word in lower case, a number rounded to `digits` significant digits."""
    if isinstance(x, str):
        return " ".join(x.casefold().split())
    if digits:
        return f"{float(x) + 0.0:.{digits - 1}e}"
    return str(int(x)) if float(x).is_integer() else repr(float(x))


def hashed(name, texts):
    return hashlib.sha256("\n".join([name, *texts]).encode()).hexdigest()[:24]


def listed(value):
    """One value or several, tensors and arrays among them, as a list of numbers and words."""
    value = plain(value)
    values = [plain(x) for x in value] if isinstance(value, (list, tuple)) else [value]
    for x in values:
        if not isinstance(x, (str, Real)):
            raise TypeError(f"`value`: got {describe(x)}, expected a number, a word or a list of them")
    return values


def plain(x):
    """A tensor or an array as Python's numbers; a number that no float holds as infinity."""
    x = x.tolist() if hasattr(x, "tolist") else x
    if isinstance(x, Real) and abs(x) > sys.float_info.max:
        return math.inf if x > 0 else -math.inf
    return x


def register(name, value, digits=None, slips=()):
    """Enter an answer, and wrong answers with what to say of them, in the table."""
    table = answers()

    def one(x):
        return hashed(name, [spelling(y, digits) for y in listed(x)])

    table[name] = {"digits": digits, "answer": one(value), "slips": {one(x): words for x, words in slips}}
    TABLE.write_text(json.dumps(dict(sorted(table.items())), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def parsed(text):
    """The command line's words: numbers where they are numbers; commas separate several."""

    def one(part):
        try:
            return float(part)
        except ValueError:
            return part

    return [one(part) for part in text.split(",")]
