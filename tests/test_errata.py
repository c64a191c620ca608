"""The errata of the notes: every check holds, and the page prints what it found."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from book.errata import NOTES

ALL = [(f"{note}{number}", erratum) for note, errata in NOTES.items() for number, erratum in enumerate(errata, 1)]


@pytest.mark.parametrize("erratum", [pytest.param(erratum, id=f"{name}-{erratum.check.__name__}") for name, erratum in ALL])
def test_what_holds_holds(erratum):
    found = erratum.check()
    assert found and not found.endswith(".")
    assert erratum.grave in ("A", "B") and erratum.lines and erratum.words and erratum.meaning
    assert erratum.check.__doc__ and "assert" in Path(erratum.check.__code__.co_filename).read_text()


def test_every_check_can_fail():
    """An erratum whose body asserts nothing would only repeat its claim."""
    import ast
    import inspect
    import textwrap

    for _, erratum in ALL:
        body = ast.parse(textwrap.dedent(inspect.getsource(erratum.check)))
        assert any(isinstance(node, (ast.Assert, ast.Raise)) for node in ast.walk(body)), erratum.check.__name__


def test_checks_repeat():
    """The page is the same at every build."""
    for _, erratum in ALL:
        if "peak_bytes" not in erratum.check.__code__.co_names:
            assert erratum.check() == erratum.check()
