"""Build the book: execute what is not executed yet, render it, let no warning pass.

    python book/build.py                                    execute the notebooks, then _build/html
    python book/build.py --stored --out _build/stored       render the outputs stored in the notebooks

Two fingerprints decide what may be reused. Executed notebooks are kept until the package, the
requirements or Python change: the cache itself looks only at a notebook's own code. The pages are kept
while nothing at all has changed, and otherwise rendered anew as a whole, because an incremental build
forgets the warnings of pages that it does not read again.
"""

import argparse
import hashlib
import os
import shutil
import sys
import time
from pathlib import Path

IGNORED = {"__pycache__", ".ipynb_checkpoints"}


def fingerprint(root: Path, *patterns: str) -> str:
    """A digest of the Python version and of every file under ``root`` that matches a pattern."""
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted({p for pattern in patterns for p in root.glob(pattern)}):
        if path.is_file() and not IGNORED & set(path.parts):
            digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def execution_fingerprint(root: Path) -> str:
    """What a notebook's outputs depend on, beside its own cells."""
    return fingerprint(root, "linattn_edu/**/*", "requirements.txt", "book/constraints.txt", "book/data/**/*", "notebooks/*.[!i]*")


def site_fingerprint(root: Path) -> str:
    """What the rendered pages depend on."""
    sys.path.insert(0, str(root / "book" / "_ext"))
    from edition import edition

    sources = fingerprint(root, "linattn_edu/**/*", "requirements.txt", "book/**/*", "notebooks/*", "_config.yml", "_toc.yml")
    return f"{sources} {edition(root)}"


def execute(root: Path, jobs: int, timeout: int = 600) -> bool:
    """Run the notebooks that the cache does not hold, ``jobs`` at a time; True if none failed."""
    import nbformat
    from concurrent.futures import ThreadPoolExecutor
    from jupyter_cache import get_cache
    from jupyter_cache.base import CacheBundleIn
    from jupyter_cache.executors.utils import single_nb_execution

    folder, stamp = root / "_build" / ".jupyter_cache", root / "_build" / ".executed-with"
    current = execution_fingerprint(root)
    if not stamp.exists() or stamp.read_text() != current:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        stamp.write_text(current)
    cache = get_cache(folder)

    def missing(path: Path) -> bool:
        try:
            cache.match_cache_notebook(nbformat.read(path, as_version=4))
        except KeyError:
            return True
        return False

    def run(path: Path):
        print(f"executing {path.relative_to(root)}", flush=True)
        notebook = nbformat.read(path, as_version=4)
        return path, single_nb_execution(notebook, cwd=str(path.parent), timeout=timeout, allow_errors=False)

    # Kernels side by side share the cores instead of fighting for them.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    todo = [path for path in sorted((root / "notebooks").glob("*.ipynb")) if missing(path)]
    failed = False
    with ThreadPoolExecutor(jobs) as pool:
        for path, result in pool.map(run, todo):
            if result.err is not None:
                failed = True
                print(f"\n{path.relative_to(root)} raised:\n{result.exc_string}", file=sys.stderr)
                continue
            print(f"executed  {path.relative_to(root)} in {result.time:.0f} s", flush=True)
            bundle = CacheBundleIn(result.nb, str(path), data={"execution_seconds": result.time})
            cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
    return not failed


def render(root: Path, out: Path, stored: bool) -> bool:
    """Render every page into ``out``/html, with warnings as errors; True if there were none."""
    from jupyter_book.sphinx import build_sphinx

    html = out / "html"
    shutil.rmtree(html, ignore_errors=True)
    status = build_sphinx(
        root, html, noconfig=True, path_config=root / "_config.yml", doctreedir=out / ".doctrees",
        confoverrides={
            "latex_individualpages": False,
            "external_toc_path": str(root / "_toc.yml"),
            "nb_execution_mode": "off" if stored else "cache",
            "nb_execution_cache_path": str(root / "_build" / ".jupyter_cache"),
        },
        force_all=True, freshenv=True, warningiserror=True, keep_going=True, quiet=True,
    )
    if status != 0:
        return False
    (html / "index.html").write_text('<!doctype html><title>Linear attention</title><meta http-equiv="refresh" content="0; url=book/index.html">\n')
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the checkout")
    parser.add_argument("--out", type=Path, default=Path("_build"), help="folder for html/, relative to the root")
    parser.add_argument("--jobs", type=int, default=2, help="notebooks that run at the same time")
    parser.add_argument("--stored", action="store_true", help="render stored outputs, execute nothing")
    args = parser.parse_args()
    root, start = args.root.resolve(), time.time()
    out = root / args.out
    out.mkdir(parents=True, exist_ok=True)

    stamp, current = out / ".rendered-from", site_fingerprint(root)
    if stamp.exists() and stamp.read_text() == current:
        print("Nothing has changed since the last build.")
    else:
        stamp.unlink(missing_ok=True)
        if not args.stored and not execute(root, args.jobs):
            print("\nThe book was not built: a notebook failed.", file=sys.stderr)
            return 1
        if not render(root, out, args.stored):
            print("\nThe book was not built: see the warnings above.", file=sys.stderr)
            return 1
        stamp.write_text(current)
        print(f"Built in {time.time() - start:.0f} s.")
    print(f"The book: {out / 'html' / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
