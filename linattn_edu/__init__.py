"""linattn_edu: linear attention from softmax to Kimi Delta Attention, in formulas that run.

Every variant is a module with the forms `recurrent`, `parallel`, `chunkwise`, `fused` and `step`, which all compute
one function. Glossary of the letters in all signatures:

    B batch    T tokens    H query/key heads    HV value heads    K key dim    V value dim    N sequences    C chunk
"""

from linattn_edu import decay, deltanet, gated_deltanet, gates, gla, kda, linear, mamba, short_conv, softmax
from linattn_edu.algebra import l2norm

__version__ = "0.1.0"

VARIANTS = {
    "softmax": softmax,
    "linear": linear,
    "decay": decay,
    "gla": gla,
    "deltanet": deltanet,
    "gated_deltanet": gated_deltanet,
    "kda": kda,
}

__all__ = ["VARIANTS", "decay", "deltanet", "gated_deltanet", "gates", "gla", "kda", "l2norm", "linear", "mamba", "short_conv", "softmax"]
