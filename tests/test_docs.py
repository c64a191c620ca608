"""Every code block that a reader may copy runs: README, pages, docstrings."""

import doctest
import importlib
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import linattn_edu

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "book").glob("*.md"))]
MODULES = ["linattn_edu"] + [
    module.name for module in pkgutil.walk_packages(linattn_edu.__path__, "linattn_edu.") if not module.name.endswith("__main__")
]


def blocks(language):
    """(page, code) of every fenced block in a language, as pytest parameters."""
    found = []
    for page in PAGES:
        for number, code in enumerate(re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL), 1):
            found.append(pytest.param(code, id=f"{page.name}-{number}"))
    return found


def test_readme_is_short_and_names_the_commands():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) < 150
    assert "make book" in readme and "make test" in readme and "LINATTN_EDU_SOURCE" in readme
    for link in re.findall(r"\]\((?!https?:|#)([^)]+)\)", readme):
        assert (ROOT / link).exists(), f"README links to {link}"


@pytest.mark.parametrize("code", blocks("python"))
def test_python_block_runs(code, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", blocks("sh"))
def test_shell_block_names_real_commands(code):
    """`make` targets exist, modules of the package run, and what is installed is what `make wheel` writes."""
    for line in code.splitlines():
        words = shlex.split(line, comments=True)
        match words:
            case []:
                pass
            case ["make", *targets]:
                subprocess.run(["make", "--dry-run", "--always-make", *targets], cwd=ROOT, check=True, capture_output=True)
            case ["python", "-m", module] if module.startswith("linattn_edu"):
                subprocess.run([sys.executable, "-m", module], check=True, capture_output=True)
            case ["pip", "install", wheel]:
                assert re.fullmatch(r"(\./)?dist/linattn_edu-\*\.whl(\[[\w,]+\])?", wheel)
            case _:
                pytest.fail(f"the test does not know how to check: {line}")


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_of_module(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0


def test_some_docstring_has_an_example():
    finder = doctest.DocTestFinder()
    assert any(test.examples for name in MODULES for test in finder.find(importlib.import_module(name)))
