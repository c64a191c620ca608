# Setup, the same in every notebook: finds linattn_edu and says what this machine can run.
import importlib.util, os, pathlib, subprocess, sys

here = pathlib.Path.cwd()
checkout = next((p for p in (here, *here.parents) if (p / "linattn_edu" / "__init__.py").is_file()), None)
if checkout:
    sys.path.insert(0, str(checkout))
elif importlib.util.find_spec("linattn_edu") is None:
    source = os.environ.get("LINATTN_EDU_SOURCE") or max(map(str, here.glob("linattn_edu-*.whl")), default=None)
    if source is None:
        raise ModuleNotFoundError(
            "linattn_edu is not on this machine. Run `make wheel` in the project's folder, upload dist/linattn_edu-*.whl "
            "beside this notebook (in Colab: the folder icon on the left), and run this cell again. "
            "Or set the environment variable LINATTN_EDU_SOURCE to a git URL or to a wheel.")
    if "://" in source and not source.endswith(".whl") and not source.startswith("git+"):
        source = "git+" + source
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", source, "matplotlib", "tqdm"], check=True)
    importlib.invalidate_caches()

from linattn_edu import doctor, viz

viz.use_style()
print(doctor.summary())
