"""`python -m linattn_edu.check NAME VALUE`: add an answer to the table; see `answers.py`."""

import argparse

from linattn_edu.check.answers import parsed, register

parser = argparse.ArgumentParser(
    prog="python -m linattn_edu.check", description="Add the answer of an exercise to the table."
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

if __name__ == "__main__":
    given = parser.parse_args()
    register(given.name, parsed(given.value), given.digits, [(parsed(x), words) for x, words in given.slip])
