"""Which edition of the book this is: version, date and, where git knows it, the commit."""

import datetime
import re
import subprocess
from pathlib import Path


def version(root: Path) -> str:
    """The package's version, read and not imported."""
    source = (root / "linattn_edu" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)[1]


def edition(root: Path) -> str:
    """For example ``0.1.0, 2026-11-29, commit 1a2b3c4``; the date is the commit's, or else today."""
    try:
        log = ["git", "-C", str(root), "log", "-1", "--format=%cs, commit %h"]
        when = subprocess.run(log, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        when = datetime.date.today().isoformat()
    return f"{version(root)}, {when}"
