"""The same problems for functions of one sequence and one head, without these axes: q is [T, K], the state [K, V]."""

from dataclasses import replace
from functools import partial

from linattn_edu.check.cases import is_floating, tree_map
from linattn_edu.check.reader import named_results


def without_heads(problem):
    """The problem on tensors without the axes B and H; other functions are adapted to it by `problem.adapt`."""
    if "heads" not in problem.traits or problem.name.startswith("decay.") and "state" not in problem.traits:
        raise ValueError(f"`heads`: got False for {problem.name}, expected a form of a variant")
    by_token = {*problem.over_time, *problem.results[: 1 if problem.over_time else 0]}
    if problem.name.startswith("softmax"):
        by_token |= {"initial_state", "state", *problem.results[1:]}  # a cache has tokens too

    def removed(name, x):
        return x if not is_floating(x) else x[0, :, 0] if name in by_token else x[0, 0]

    def added(name, x):
        return x if not is_floating(x) else x[None, :, None] if name in by_token else x[None, None]

    def adapt(function):
        def adapted(**arguments):
            returned = function(**{key: tree_map(partial(added, key), x) for key, x in arguments.items()})
            results = named_results(returned, problem.results)
            return tuple(removed(name, x) for name, x in results.items())

        return adapted

    def draw(setting, options):
        drawn = problem.draw(replace(setting, B=1, H=1, HV=1), options)
        return {key: tree_map(partial(removed, key), x) for key, x in drawn.items()}

    letters = " ".join(x for x in problem.letters.split() if x in "TKV")
    traits = problem.traits - {"heads", "packed", "packed_state"}
    reference = adapt(problem.reference)
    return replace(
        problem, reference=reference, draw=draw, adapt=adapt, time_axis=0, traits=traits, letters=letters, known={}
    )
