"""What others offer for the same functions: softmax attention by torch's own kernels, and flash-linear-attention."""

import importlib
import importlib.metadata
import importlib.util

import torch
import torch.nn.functional as F

CHUNK = {
    "linear": ("linear_attn", "chunk_linear_attn", {"normalize": False}),
    "decay": ("simple_gla", "chunk_simple_gla", {}),
    "gla": ("gla", "chunk_gla", {}),
    "deltanet": ("delta_rule", "chunk_delta_rule", {}),
    "gated_deltanet": ("gated_delta_rule", "chunk_gated_delta_rule", {}),
    # Its fastest public setting; it promises gates of at least -5, which ours does not ask for.
    "kda": ("kda", "chunk_kda", {"safe_gate": True, "lower_bound": -5.0}),
}
DECODE = {
    "linear": ("linear_attn", "fused_recurrent_linear_attn", {"normalize": False}),
    "decay": ("simple_gla", "fused_recurrent_simple_gla", {}),
    "gla": ("gla", "fused_recurrent_gla", {}),
    "deltanet": ("delta_rule", "fused_recurrent_delta_rule", {}),
    "gated_deltanet": ("gated_delta_rule", "fused_recurrent_gated_delta_rule", {}),
    "kda": ("kda", "fused_recurrent_kda", {}),
}

GUARDED = ("decay", "gated_deltanet")
"""The operators whose gradient FLA refuses to compute on Hopper with Triton 3.4 to 3.7.0."""


def sdpa(q, k, v):
    """Causal softmax attention by torch's own kernels."""
    o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return o.transpose(1, 2), None


def fla_version():
    """The installed version of flash-linear-attention's kernels, or None."""
    return importlib.metadata.version("fla-core") if importlib.util.find_spec("fla") else None


def fla(table, name):
    """FLA's function for an operator with our argument names, or None where it has none or is not installed."""
    if name not in table or fla_version() is None:
        return None
    package, function, options = table[name]
    function = getattr(importlib.import_module(f"fla.ops.{package}"), function)

    def call(*, initial_state=None, output_final_state=False, **a):
        if name == "gla" and table is DECODE:
            a["gk"] = a.pop("g")
        return function(**a, **options, initial_state=initial_state, output_final_state=output_final_state)

    return call


def lift_guard():
    """Let FLA's gated backward run where it refuses to: on Hopper, where some versions of Triton make its gradients wrong.

    For timing alone. Returns what to write beside the figures, or nothing where the guard does not act.
    """
    if fla_version() is None or not torch.cuda.is_available():
        return ""
    import triton

    output = importlib.import_module("fla.ops.common.chunk_o")
    acts = output.IS_NVIDIA_HOPPER and output.TRITON_ABOVE_3_4_0 and not output.TRITON_ABOVE_3_7_1
    if acts:
        output.TRITON_ABOVE_3_7_1 = True
    return f"FLA refuses this gradient with Triton {triton.__version__}; its guard was lifted" if acts else ""
