"""The form of a chapter: budgets, stored outputs, the setup cell, captions, exercises.

That the stored outputs are what the code prints is nbval's part (`make test`).
"""

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXEMPT = {"nbval-ignore-output", "nbval-skip"}


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture(scope="module")
def notebook(path):
    return nbformat.read(path, as_version=4)


@pytest.fixture(scope="module")
def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def prose(notebook):
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def tags(cell):
    return set(cell.metadata.get("tags", []))


def html_outputs(cell):
    return [output.data["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]


def test_there_are_notebooks_and_each_is_in_the_table_of_contents():
    toc = (ROOT / "_toc.yml").read_text()
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        assert re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem)
        assert re.search(rf"file: notebooks/{path.stem}$", toc, re.MULTILINE), f"{path.name} is missing in _toc.yml"


def test_notebook_is_valid_and_runs_in_any_python3_kernel(notebook):
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"


def test_notebook_keeps_within_its_budgets(path, code, prose):
    assert len(code) <= 20
    assert max(len(cell.source.splitlines()) for cell in code) <= 40
    assert 600 <= len(prose.split()) <= 4000
    assert path.stat().st_size <= 400_000
    assert sum(bool(tags(cell) & EXEMPT) for cell in code) <= len(code) / 2


def test_no_line_of_code_is_cut_off_on_a_laptop(code):
    """Beyond 92 columns a page of 1280 pixels has to be scrolled sideways; the setup cell is folded away."""
    for number, cell in enumerate(code[1:], 2):
        for line in cell.source.splitlines():
            assert len(line) <= 92, f"code cell {number}, {len(line)} columns: {line}"


def test_no_line_of_what_is_printed_is_cut_off_on_a_laptop(code):
    for number, cell in enumerate(code, 1):
        printed = [output for output in cell.outputs if output.output_type == "stream"]
        assert {output.name for output in printed} <= {"stdout"}, f"code cell {number}: a bar of progress or a warning"
        for line in "".join(output.text for output in printed).splitlines():
            assert len(line) <= 92, f"code cell {number}, {len(line)} columns: {line}"


def test_every_cell_was_executed_in_order(code):
    """nbval compares nothing for a cell that was never executed."""
    counts = [cell.execution_count for cell in code if "nbval-skip" not in tags(cell)]
    assert counts == list(range(1, len(counts) + 1))


def test_setup_cell_is_the_common_one(code):
    setup = (ROOT / "book" / "setup_cell.py").read_text()
    assert code[0].source.strip() == setup.strip()
    assert {"nbval-ignore-output", "hide-input"} <= tags(code[0])
    assert not any("LINATTN_EDU_SOURCE" in cell.source for cell in code[1:])


def test_notebook_has_one_title_at_its_top(notebook, prose):
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")
    without_code = re.sub(r"^(```|~~~).*?^\1", "", prose, flags=re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"^# ", without_code, re.MULTILINE)) == 1


def test_every_picture_has_a_caption_a_name_and_alt_text(code):
    for number, cell in enumerate(code, 1):
        if any("image/png" in output.get("data", {}) for output in cell.outputs):
            mystnb = cell.metadata.get("mystnb", {})
            for kind, key in (("figure", "caption"), ("figure", "name"), ("image", "alt")):
                assert mystnb.get(kind, {}).get(key, "").strip(), f"code cell {number}: no mystnb.{kind}.{key}"
        for html in html_outputs(cell):
            for image in re.findall(r"<img\b[^>]*>", html):
                assert re.search(r'\balt="[^"]+"', image), f"code cell {number}: no alt text in {image[:80]}"


def test_outputs_hold_no_warning_no_error_and_no_path_of_a_machine(code):
    """A progress bar is all that may go to stderr, from a cell that says so; the book leaves it out."""
    for number, cell in enumerate(code, 1):
        for output in cell.outputs:
            if output.get("name") == "stderr":
                bars = [line for line in re.split(r"[\r\n]+", output.text) if line.strip()]
                assert {"nbval-ignore-output", "remove-stderr"} <= tags(cell), f"code cell {number} wrote to stderr"
                assert all(re.search(r"\d+%\|", line) for line in bars), f"code cell {number}: {output.text[:200]}"
            assert output.output_type != "error" or "raises-exception" in tags(cell), f"code cell {number} raised"
            data = output.get("data", {})
            text = output.get("text", "") + data.get("text/plain", "") + data.get("text/html", "")
            assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users)/", text), f"code cell {number} prints a local path"


def test_nothing_is_loaded_from_another_host(code):
    for cell in code:
        for html in html_outputs(cell):
            assert not re.search(r"""(src|href)=["']https?:""", html)


EXERCISE = re.compile(
    r"^[`:]{3,}\{(exercise|exercise-start|solution|solution-start)\}[ \t]*(.*)\n((?::[\w-]+:.*\n)*)", re.MULTILINE
)


def test_there_are_two_to_four_exercises_each_with_a_hidden_solution(prose):
    found = [(kind.removesuffix("-start"), title.strip(), options) for kind, title, options in EXERCISE.findall(prose + "\n")]
    assert 2 <= sum(kind == "exercise" for kind, _, _ in found) <= 4
    assert [kind for kind, _, _ in found] == ["exercise", "solution"] * (len(found) // 2)
    for (_, _, asked), (_, answered, options) in zip(found[::2], found[1::2]):
        assert re.search(r":label: (\S+)", asked)[1] == answered
        assert ":class: dropdown" in options, f"the solution of {answered} is not hidden"


def test_no_macros(prose):
    """MathJax would know a macro of the book's configuration; Colab, JupyterLab and GitHub would not."""
    assert not re.search(r"\\(newcommand|renewcommand|DeclareMathOperator|def)\b", prose)
