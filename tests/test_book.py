"""The book: what its pages promise, that it needs no network, and that its build notices what it must notice."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import linattn_edu

ROOT = Path(__file__).resolve().parents[1]


def toc_files():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    return [toc["root"]] + [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]


# The sources.


def test_every_page_and_every_variant_has_its_place():
    pages = {path.relative_to(ROOT).with_suffix("").as_posix() for path in (ROOT / "book").glob("*.md")}
    assert pages <= set(toc_files())
    api = (ROOT / "book" / "api.md").read_text()
    for variant in linattn_edu.VARIANTS.values():
        assert f"automodule:: {variant.__name__}\n" in api


def test_the_map_marks_what_is_not_yet_written():
    rows = re.findall(r"^\| (.+?) \| ", (ROOT / "book" / "index.md").read_text().split("## The chapters")[0], re.MULTILINE)[1:]
    assert len(rows) == 9
    for row in rows:
        link = re.match(r"\[.+\]\(\.\./(notebooks/\w+)\.ipynb\)$", row)
        assert (link[1] in toc_files()) if link else row.endswith("[not yet written]{.unwritten}"), row


def test_the_landing_page_and_the_readme_list_every_chapter_with_its_minutes():
    index, readme = ((ROOT / name).read_text() for name in ("book/index.md", "README.md"))
    for file in toc_files():
        if file.startswith("notebooks/"):
            notebook = json.loads((ROOT / f"{file}.ipynb").read_text())
            minutes = re.search(r"Reading time: (\d+) minutes", "".join(notebook["cells"][0]["source"]))[1]
            assert re.search(rf"^\| \[\]\(\.\./{file}\.ipynb\) \| .+ \| {minutes} \|$", index, re.MULTILINE), file
            assert f"({file}.ipynb)" in readme


def test_every_glossary_entry_has_a_chinese_name():
    glossary = (ROOT / "book" / "glossary.md").read_text().split(":sorted:")[1]
    entries = [entry for entry in re.split(r"\n\n+", glossary.strip().removesuffix("```").strip())]
    assert len(entries) > 50
    for entry in entries:
        terms = "\n".join(line for line in entry.splitlines() if not line.startswith(" "))
        assert re.search(r"[\u4e00-\u9fff]", terms) or terms.split("\n")[0] in ("NoPE",), terms


def test_no_machine_and_no_macro_in_the_pages():
    for path in [*(ROOT / "book").rglob("*.md"), ROOT / "book" / "references.bib", ROOT / "README.md"]:
        text = path.read_text()
        assert not re.search(r"(?<![\w./])/(home|root|tmp|work|Users)/", text), path
        assert not re.search(r"\\(newcommand|renewcommand|DeclareMathOperator|def)\b", text), path


# The rendered pages.


def html_pages(book):
    return [path for path in book.rglob("*.html") if "_static" not in path.parts and path != book / "index.html"]


def test_no_page_asks_another_host_for_anything(book):
    loads = re.compile(r"""<(?:script|img|iframe|source|embed)\b[^>]*\bsrc=["']((?:https?:)?//[^"']+)|<link\b[^>]*\bhref=["']((?:https?:)?//[^"']+)""")
    for path in html_pages(book):
        assert not loads.findall(path.read_text()), path
        assert "thebe" not in path.read_text().lower(), path
    for path in book.rglob("*.css"):
        assert not re.search(r"""(@import|url\()\s*["']?(https?:)?//""", path.read_text()), path


def test_footer_names_edition_and_licences(book):
    for path in html_pages(book):
        footer = path.read_text().split('<footer class="bd-footer-content">')[1]
        assert f"Edition {linattn_edu.__version__}, " in footer and "CC BY 4.0" in footer and "MIT" in footer


def test_every_chapter_is_numbered_and_has_its_pictures(book):
    for name in toc_files():
        if name.startswith("notebooks/"):
            html = (book / f"{name}.html").read_text()
            assert '<span class="section-number">' in html
            assert html.count("<figcaption") >= 1


# The build itself, on a book of one page and one notebook.

NOTEBOOK = """{"cells": [
 {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# Probe\\n", "\\n", "See {ref}`here`.\\n", "\\n", "(here)=\\n", "## Here"]},
 {"cell_type": "code", "id": "b", "metadata": {}, "execution_count": null, "outputs": [],
  "source": ["import linattn_edu\\n", "print('value', linattn_edu.VALUE)"]}
], "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
"nbformat": 4, "nbformat_minor": 5}"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A checkout with the real build script and configuration around a package of one number."""
    root = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "book", root / "book", ignore=shutil.ignore_patterns("*.md", "__pycache__"))
    for name in ("_config.yml", "requirements.txt"):
        shutil.copy(ROOT / name, root)
    (root / "linattn_edu").mkdir()
    (root / "notebooks").mkdir()
    (root / "book" / "index.md").write_text("# Index\n\n{cite}`yang2025gdn`\n\n```{bibliography}\n```\n")
    (root / "_toc.yml").write_text("format: jb-book\nroot: book/index\nchapters:\n- file: notebooks/probe\n")
    set_value(root, "'one'")
    (root / "notebooks" / "probe.ipynb").write_text(NOTEBOOK)
    return root


def set_value(root, value):
    (root / "linattn_edu" / "__init__.py").write_text(f'__version__ = "9.9.9"\nVALUE = {value}\n')


def build(root):
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run([sys.executable, "book/build.py"], cwd=root, capture_output=True, text=True, env=environment)


def probe(root):
    return (root / "_build" / "html" / "notebooks" / "probe.html").read_text()


def test_build_executes_once_and_again_after_an_edit_of_the_package(project):
    set_value(project, "'one'")
    first = build(project)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "executing notebooks/probe.ipynb" in first.stdout and "value one" in probe(project)
    assert first.stdout.rstrip().endswith(str(project / "_build" / "html" / "index.html"))

    again = build(project)
    assert again.returncode == 0 and "executing" not in again.stdout and "Nothing has changed" in again.stdout

    set_value(project, "'two'")
    edited = build(project)
    assert edited.returncode == 0 and "executing" in edited.stdout and "value two" in probe(project)

    page = project / "book" / "index.md"
    page.write_text(page.read_text() + "\nMore.\n")
    touched = build(project)
    assert touched.returncode == 0 and "executing" not in touched.stdout, "a change of prose needs no execution"


def test_build_fails_when_a_cell_raises_and_goes_on_failing(project):
    set_value(project, "1 / 0")
    for _ in range(2):
        failed = build(project)
        assert failed.returncode == 1 and "ZeroDivisionError" in failed.stderr and "was not built" in failed.stderr
    set_value(project, "'one'")


SLIPS = {
    "[nowhere](nowhere.md)": "nowhere.md",
    "{ref}`no-label`": "no-label",
    "{cite}`nobody1999`": "nobody1999",
    "{term}`no such term`": "no such term",
    "{numref}`fig-none`": "fig-none",
    "![none](_static/none.png)": "none.png",
}


def test_build_fails_on_what_does_not_exist_and_goes_on_failing(project):
    page = project / "book" / "index.md"
    good = page.read_text()
    page.write_text(good + "\n" + "\n\n".join(SLIPS) + "\n")
    for _ in range(2):
        failed = build(project)
        assert failed.returncode == 1, failed.stdout + failed.stderr
        for name in SLIPS.values():
            assert re.search(rf"WARNING: .*{re.escape(name)}", failed.stderr), name
    page.write_text(good)
