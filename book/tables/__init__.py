"""Tables of the book whose entries are computed: a page names a function, `{computed} variants.table`, and shows its rows.

A table is a list of rows of Markdown; the first is the header.
"""

from book.tables import data_files, feature_maps, kernel_versions, memory, variants  # noqa: F401
