"""The hidden solutions of the code exercises pass the checks that the exercises themselves ask for."""

import ast
import re
import textwrap
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))
SOLUTION = re.compile(r"^`{3,}\{solution\} (\S+)\n(?:(?!^`{3,}\{).)*?^(```|~~~)python\n(.*?)^\2$", re.MULTILINE | re.DOTALL)


def defines(node):
    """Whether a statement only gives a name to a module, a function or a literal."""
    if isinstance(node, ast.Assign):
        return all(isinstance(x, (ast.Dict, ast.Constant, ast.Load)) for x in ast.walk(node.value))
    return isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef))


def solved(cell, answer):
    """The exercise's cell with the answer in place: a whole function after it, or a loop for the one that it has."""
    if not answer.startswith(" "):
        return f"{cell}\n{answer}"
    loop = re.compile(r"^( +)for .*\n(?:\1 .*\n)+", re.MULTILINE)
    indent = loop.search(cell)[1]
    return loop.sub(lambda _: textwrap.indent(textwrap.dedent(answer), indent), cell, count=1)


def checked(cell, answer):
    """The calls of `check` in an exercise's cell that ask for a function of the answer."""
    for call in ast.walk(ast.parse(cell)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check":
            name = call.args[1].id
            if f"def {name}(" in solved(cell, answer) and (answer.startswith(" ") or f"def {name}(" in answer):
                yield call


def exercises():
    """Label, the code above the exercise, its cell with the answer in place, and the call that judges it."""
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        for n, cell in enumerate(cells):
            for label, _, answer in SOLUTION.findall(cell.source) if cell.cell_type == "markdown" else ():
                code = next((x.source for x in cells[n:] if x.cell_type == "code"), "")
                above = [x.source for x in cells[:n] if x.cell_type == "code"]
                for call in checked(code, answer):
                    yield pytest.param([*above, solved(code, answer)], call, id=label)


FOUND = list(exercises())


def test_all_exercises_with_a_checker_are_found():
    assert len(FOUND) >= 11


@pytest.mark.parametrize("cells, call", FOUND)
def test_solution_passes_its_check(cells, call, capsys):
    space = {}
    for cell in cells:
        definitions = list(filter(defines, ast.parse(cell).body))
        exec(compile(ast.Module(definitions, []), "<notebook>", "exec"), space)
    report = eval(compile(ast.Expression(call), "<notebook>", "eval"), space)
    assert not report.failures, capsys.readouterr().out
