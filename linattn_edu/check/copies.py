"""Private copies of the package's modules, with a text replaced in one function: how a slip is planted.

`sys.modules` and the originals stay as they are. A copy of a module imports copies of the modules that it uses.
"""

import ast
import builtins
import functools
import importlib
import importlib.util
from types import ModuleType, SimpleNamespace

PACKAGE = "linattn_edu"
AS_THEY_ARE = ("kernels", "validate", "docstrings")
"""Modules that are not copied: they hold no formula, or Triton must find their source in a file."""
SHORT_SEGMENT = 32
"""Tokens a segment in the copies, so that short inputs have several."""
ELSEWHERE = {"softmax.merge": ("check.blocks", "merge"), "algebra.solve_unit_lower": ("check.blocks", "solve")}


def located(name):
    """The module and the attributes where the function for a name of `check` is found."""
    module, form = name.split(".")
    if form in ("update", "inter"):
        return module, "operator", form
    return ELSEWHERE.get(name, (module, form.replace("online", "chunkwise")))


@functools.cache
def source(module):
    """The text of a module of the package."""
    spec = importlib.util.find_spec(f"{PACKAGE}.{module}")
    return spec.loader.get_source(spec.name)


@functools.cache
def compiled(module):
    return compile(source(module), f"<copy of {module}>", "exec")


def replaced(module, function, old, new):
    """The text of a module after `old`, which must occur once in the function "f" or "Class.f", became `new`."""
    text, nodes = source(module), ast.parse(source(module)).body
    for name in function.split("."):
        [node] = [node for node in nodes if getattr(node, "name", None) == name]
        nodes = node.body
    lines = text.splitlines(keepends=True)
    start, stop = node.lineno - 1, node.end_lineno
    before, body, after = ("".join(part) for part in (lines[:start], lines[start:stop], lines[stop:]))
    if body.count(old) != 1:
        raise ValueError(f"{module}.{function}: {old!r} occurs {body.count(old)} times, expected once")
    return before + body.replace(old, new) + after


class Copy:
    """A copy of the package, with one mutant's slip or none."""

    def __init__(self, mutant=None):
        self.mutant, self.modules = mutant, {}

    def function(self, name):
        """The function for a name of `check`, as "linear.recurrent"."""
        module, *path = located(name)
        return functools.reduce(getattr, path, self.module(module))

    def module(self, name):
        if name.startswith(AS_THEY_ARE):
            return importlib.import_module(f"{PACKAGE}.{name}")
        if name not in self.modules:
            mutated = self.mutant is not None and self.mutant.module == name
            code = compile(self.mutant.source(), f"<mutant of {name}>", "exec") if mutated else compiled(name)
            module = self.modules[name] = ModuleType(f"copy.{name}")
            module.__builtins__ = vars(builtins) | {"__import__": self.load}
            exec(code, vars(module))
            if name == "forms":
                module.SEGMENT = SHORT_SEGMENT
        return self.modules[name]

    def load(self, name, globals=None, locals=None, fromlist=(), level=0):
        """What an import statement gets: copies of this package's modules, everything else as it is."""
        package, _, rest = name.partition(".")
        if package != PACKAGE:
            return builtins.__import__(name, globals, locals, fromlist, level)
        return self.module(rest) if rest else SimpleNamespace(**{part: self.module(part) for part in fromlist})


@functools.cache
def used_by(name):
    """The modules that the function for a name of `check` is made of."""
    copy = Copy()
    copy.function(name)
    return frozenset(copy.modules)
