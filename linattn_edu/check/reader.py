"""A reader's function, called with the arguments that it takes, and understood whatever it returns."""

import contextlib
import inspect
import traceback

import torch

from linattn_edu.check.cases import is_floating, leaves, tree_map

OPTIONAL = (
    *("initial_state", "output_final_state", "cu_seqlens", "chunk_size", "scale", "causal"),
    *("feature_map", "normalize", "eps", "discretization", "D", "bias", "activation"),
)


class Stop(Exception):
    """The function raised, or what it returned cannot be judged; the message says so in words."""


class Reader:
    """The function under test. `names` maps each argument of the problem that it takes to its own name for it.

    `returned` are the names of the results to look at, all if None; `seen` is filled with what theorems saw of it.
    """

    def __init__(self, problem, function, *, names=None, returned=None):
        self.problem, self.function = problem, function
        self.names = matched(problem, function) if names is None else names
        parameters = signature(problem, function).items()
        self.positional = [own for own, p in parameters if p.kind is p.POSITIONAL_ONLY]
        self.returned, self.seen = returned, {}

    def takes(self, argument):
        return argument in self.names

    def like(self, function):
        """The package's function, or a mutant of it, called and read in the same way."""
        known = {*self.names, *self.problem.options, "output_final_state"}
        names = {name: own for name, own in matched(self.problem, function).items() if name in known}
        return Reader(self.problem, self.problem.adapt(function), names=names, returned=self.returned)

    def __call__(self, arguments, copied=True):
        """The results by name: those of `problem.results` that the function returns."""
        given = {self.names[key]: x for key, x in arguments.items() if key in self.names}
        if copied:
            given = {key: tree_map(copy, x) for key, x in given.items()}
        first = [given.pop(own) for own in self.positional if own in given]
        dtype = next(y.dtype for x in arguments.values() for y in leaves(x) if is_floating(y))
        try:
            with default_dtype(dtype):
                returned = self.function(*first, **given)
        except Exception as error:
            raise Stop(in_words(error, self.function)) from None
        results = named_results(returned, self.problem.results)
        return results if self.returned is None else {name: x for name, x in results.items() if name in self.returned}


def copy(x):
    return x.clone() if isinstance(x, torch.Tensor) else x


def matched(problem, function):
    """Which argument of the problem goes to which parameter: by name, else the data in order."""
    parameters = signature(problem, function)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return {name: name for name in (*problem.data, *OPTIONAL, *problem.options)}
    names = {}
    for name in (*problem.data, *OPTIONAL, *problem.options):
        for alias in (name, f"{name}_t", "state" if name == "initial_state" else name):
            if alias in parameters and alias not in names.values():
                names.setdefault(name, alias)
    free = [name for name, p in parameters.items() if name not in names.values() and p.default is p.empty]
    lacking = [name for name in problem.data if name not in names]
    names |= dict(zip(lacking, free))
    if len(free) < len(lacking):
        raise Stop(f"has no argument {listed(lacking[len(free) :])}; {problem.name} needs {listed(problem.data)}")
    if len(free) > len(lacking):
        raise Stop(f"asks for {listed(free[len(lacking) :])}; {problem.name} has {listed(problem.data)}")
    return names


def signature(problem, function):
    """The parameters by name; the data in order where Python knows none, as for `torch.sigmoid`."""
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        return inspect.signature(target).parameters
    except ValueError:
        return {name: inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in problem.data}


def listed(names):
    return ", ".join(f"`{name}`" for name in names)


def named_results(returned, results):
    """Flatten (o, state) or (o, (S, z)); a state of None counts as none."""
    flat = [x for x in flattened(returned) if x is not None]
    for x in flat:
        if not isinstance(x, torch.Tensor):
            raise Stop(f"returns {type(x).__name__} where a tensor was expected")
    if not 1 <= len(flat) <= len(results):
        raise Stop(f"returns {len(flat) or 'no'} tensors, expected {results[0]} alone or ({', '.join(results)})")
    return dict(zip(results, flat))


def flattened(x):
    return [z for y in x for z in flattened(y)] if isinstance(x, (tuple, list)) else [x]


@contextlib.contextmanager
def default_dtype(dtype):
    """Let a plain `torch.zeros(...)` in the reader's code have the dtype of the inputs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_words(error, function):
    """The error and the line of the reader's own code that it came from."""
    own = getattr(inspect.unwrap(function), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    here = [frame.line for frame in frames if own is not None and frame.filename == own.co_filename and frame.line]
    said = (str(error).splitlines() or [""])[0]
    return f"raises {type(error).__name__}: {said}" + (f", at `{here[-1].partition('#')[0].strip()}`" if here else "")
