"""`python -m linattn_edu.check NAME VALUE`: for authors, add an answer to the table; see `answers.py`."""

import argparse

from linattn_edu.check.answers import answers, parsed, register

parser = argparse.ArgumentParser(
    prog="python -m linattn_edu.check",
    description="For authors: add the answer of an exercise to the table. Readers call `check_answer` in Python.",
)
parser.add_argument("name", help="id of the exercise")
parser.add_argument("value", help="the answer; commas separate several")
parser.add_argument("--digits", type=int, help="compare to so many significant digits; exactly if not given")
parser.add_argument(
    "--slip",
    nargs=2,
    action="append",
    default=[],
    metavar=("VALUE", "WORDS"),
    help="a wrong answer and what to say of it",
)
parser.add_argument("--replace", action="store_true", help="write over an answer that is there already")

if __name__ == "__main__":
    given = parser.parse_args()
    if given.name in answers() and not given.replace:
        parser.error(f"{given.name} has an answer already; to check yours, call check_answer({given.name!r}, ...) in Python")
    register(given.name, parsed(given.value), given.digits, [(parsed(x), words) for x, words in given.slip])
