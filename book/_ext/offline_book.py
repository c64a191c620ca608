"""Sphinx extension: the book's own MathJax, its footer, and plain docstrings in the API page."""

import importlib.metadata
import re
import shutil
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from edition import edition  # noqa: E402

# The part of MathJax that tex-chtml.js may load: extensions such as \boldsymbol or \cancel, the fonts, the menu.
MATHJAX = ("tex-chtml.js", "input/tex/extensions", "output/chtml/fonts/woff-v2", "a11y", "sre", "ui")


def copy_mathjax(app, exception):
    if exception is not None or app.builder.format != "html":
        return
    package = importlib.metadata.distribution("sphinx-mathjax-offline")
    source = Path(str(package.locate_file("sphinx-mathjax-offline/static/mathjax")))
    for part in MATHJAX:
        target = Path(app.outdir) / "_static" / "mathjax" / part
        if (source / part).is_dir():
            shutil.copytree(source / part, target, dirs_exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / part, target)


def write_footer(app, config):
    config.html_theme_options["extra_footer"] = (
        f"<p>Edition {edition(ROOT)}. Text and figures "
        '<a href="https://creativecommons.org/licenses/by/4.0/">CC BY 4.0</a>, code MIT.</p>'
    )


def plain_docstring(app, what, name, obj, options, lines):
    """Docstrings are plain text: paragraphs become prose, anything indented (formulas, arguments) stays as it stands."""
    rst, verbatim = [], False
    for block in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        if re.search(r"^(\s|>>>)", block, re.MULTILINE):
            if not verbatim:
                rst += [".. code-block:: none", "   :class: docstring", ""]
            rst += [*("   " + line for line in textwrap.dedent(block).split("\n")), ""]
            verbatim = True
        else:
            rst += [re.sub(r"(`+)(.+?)\1|([\\*_|])", prose, block.replace("\n", " ")), ""]
            verbatim = False
    lines[:] = rst


def prose(match):
    return f"``{match[2]}``" if match[2] else "\\" + match[3]


def setup(app):
    app.config.mathjax_path = "mathjax/tex-chtml.js"
    app.connect("config-inited", write_footer)
    app.connect("autodoc-process-docstring", plain_docstring)
    app.connect("build-finished", copy_mathjax)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
