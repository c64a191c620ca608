"""Sphinx extension: what pages compute while they are read.

`{errata} A` sets the errata of note A and runs each check; `{computed} variants.table` calls that function of
`book.tables` and sets its rows as a table, with the body of the directive as its caption.
"""

import importlib
import inspect
import sys
import textwrap
from pathlib import Path

from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def entry(number, erratum):
    """One erratum as Markdown: what the note says, what holds, what the check found, and the check."""
    check = erratum.check
    code = inspect.getsource(check)
    body = code[code.index('"""', code.index('"""') + 3) + 3 :].strip("\n")
    return f"""
::::{{container}} erratum
**{erratum.note}{number}.** *Lines {erratum.lines}{", imprecise" if erratum.grave == "B" else ""}.* {erratum.words}: "{erratum.meaning}"

{inspect.getdoc(check)}

:::{{dropdown}} Checked: {check()}
```python
{textwrap.dedent(body)}
```
:::
::::
"""


class Errata(SphinxDirective):
    required_arguments = 1

    def run(self):
        from book.errata import NOTES

        text = "".join(entry(number, erratum) for number, erratum in enumerate(NOTES[self.arguments[0]], 1))
        return self.parse_text_to_nodes(text)


class Computed(SphinxDirective):
    required_arguments = 1
    option_spec = {"name": directives.unchanged_required, "class": directives.class_option}
    has_content = True

    def run(self):
        module, _, function = self.arguments[0].rpartition(".")
        header, *rows = getattr(importlib.import_module(f"book.tables.{module}"), function)()
        lines = [header, [":--", *["--:"] * (len(header) - 1)], *rows]
        text = [f":::{{table}} {' '.join(self.content)}", f":name: {self.options['name']}", ":widths: auto", ""]
        if classes := self.options.get("class"):
            text.insert(1, f":class: {' '.join(classes)}")
        text += [f"| {' | '.join(line)} |" for line in lines] + [":::"]
        return self.parse_text_to_nodes("\n".join(text))


def setup(app):
    app.add_directive("errata", Errata)
    app.add_directive("computed", Computed)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
