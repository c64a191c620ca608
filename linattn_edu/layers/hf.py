"""Weights of a transformers module under our names."""

from torch import nn

from linattn_edu import validate


def instance(name, module, kind):
    """Check that `module` is of the class `kind` of transformers, by its name: transformers may be missing.

    What torch.compile made of one is one.
    """
    if kind not in [parent.__name__ for parent in type(getattr(module, "_orig_mod", module)).__mro__]:
        got = type(module).__name__ if isinstance(module, nn.Module) else validate.describe(module)
        hint = ": load it there first" if isinstance(module, str) else ""
        raise TypeError(f"`{name}`: got {got}, expected a {kind} of transformers{hint}")


def expect(mixer, kind):
    """Check that `mixer` is a module of the class `kind` of transformers, and that its activation is SiLU, as ours."""
    instance("mixer", mixer, kind)
    if mixer.activation not in ("silu", "swish"):
        raise ValueError(f"`mixer`: got the activation {mixer.activation!r}, expected 'silu'")


def copy(source, layer, names):
    """Copy all weights of `source` into `layer`, and return it in their dtype and on their device.

    `names` maps names of theirs to ours, of parameters or of whole submodules. A Conv1d's weight [D, 1, W] becomes
    [D, W]. A weight that is left over on either side raises.
    """
    weights = {}
    for theirs, weight in source.state_dict().items():
        prefix = max((name for name in names if f"{theirs}.".startswith(f"{name}.")), key=len, default=None)
        if prefix is None:
            raise ValueError(f"`mixer`: got the weight {theirs}, expected none of that name")
        weights[names[prefix] + theirs[len(prefix) :]] = weight
    for name, own in layer.state_dict().items():
        if name in weights:
            weights[name] = weights[name].reshape(own.shape)
    layer.load_state_dict(weights)
    first = next(iter(weights.values()))
    return layer.to(first.device, first.dtype)
