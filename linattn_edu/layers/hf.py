"""Weights of a transformers module under our names."""

import torch


def expect_silu(module):
    """Check that the module's activation is SiLU, the only one that the layers have."""
    if module.activation not in ("silu", "swish"):
        raise ValueError(f"`mixer`: got the activation {module.activation!r}, expected 'silu'")


@torch.no_grad()
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
