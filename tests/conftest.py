"""What all tests share: one thread, the rendered book, the browser, and files that stay on one worker."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

# Before torch is imported, here and in every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
NO_BROWSER = "no Chromium found"

torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Under `-n`: a file stays on one worker, and the two files that look at the rendered book share one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            return "book" if file in ("tests/test_book.py", "tests/test_browser.py") else file

    return ByFile(config, log)


def pytest_terminal_summary(terminalreporter):
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_BROWSER in str(report.longrepr)]
    if skipped:
        terminalreporter.section("browser tests were skipped")
        terminalreporter.write_line(
            f"{len(skipped)} tests of the rendered pages did not run: {NO_BROWSER}. To run them:\n"
            "  Debian, Ubuntu    apt-get install chromium fonts-noto-cjk\n"
            "  macOS             brew install --cask chromium\n"
            "  elsewhere         set CHROMIUM to the path of a Chromium or Chrome"
        )


@pytest.fixture(scope="session")
def root():
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def book():
    """The folder of the book as rendered from the outputs that are stored in the notebooks."""
    out = ROOT / "_build" / "stored"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "book/build.py", "--stored", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"the book does not build without warnings:\n{done.stdout}\n{done.stderr}"
    return out / "html"


@pytest.fixture(scope="session")
def chromium():
    """The path of a Chromium; without one the tests that need it are skipped, and on CI they fail."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(NO_BROWSER)
    return found
