"""Check a function of your own against the theorems of its operator.

    from linattn_edu.check import check

    check("linear.recurrent", my_function)

prints which theorems hold and which fail, on how small an input, and what the slip may be. `check_answer` compares a
number with an exercise's answer, of which only a hash is kept.
"""

from linattn_edu.check.answers import check_answer
from linattn_edu.check.judge import judge
from linattn_edu.check.report import Report

__all__ = ["Report", "check", "check_answer"]


def check(name, function, *, heads=True, skip=(), hints=True, quiet=False, **options):
    """Run the theorems of an operator on a function, and say in words which hold and which fail.

    Args:
        name: what the function is meant to be, as "linear.recurrent"; an unknown name raises with the list.
        function: takes the operator's arguments, or some of them: what it has no argument for is not tested.
        heads: False for a function of one sequence and one head, whose q is [T, K] and whose state is [K, V].
        skip: a key, or keys, of theorems that are not asked for, as "ragged" (see `theorems.THEOREMS`).
        hints: name the likely slip; False where finding it is the exercise.
        quiet: print nothing.
        options: of the operator, as `normalize=False`; passed to `function` too if it takes them.

    Returns:
        A report that is true if all theorems hold, with `held`, `failures`, `not_tested`, `slip`.

    Raises:
        ValueError: an unknown name, or an unknown key in `skip`.
        TypeError: what should be a function is none.
    """
    report = judge(name, function, options, skip, heads, hints)
    if not quiet:
        print(report)
        report.printed = True
    return report
