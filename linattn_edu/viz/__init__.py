"""Pictures of attention: one style, one colour per role, every function a term of the field.

Needs matplotlib (`pip install "linattn_edu[viz]"`); nothing else of the package does. Call `use_style()` once, then
pass tensors (torch or NumPy) of one head: no batch axis, no head axis.
"""

from linattn_edu.extras import need

need("matplotlib", "linattn_edu.viz")

from .attention import attention_map, attention_maps
from .curves import bars, costs, curves
from .player import Film, film
from .schemes import bracketing, chunked_mask
from .states import state_film, state_map, state_strip
from .style import COLORS, INK, MUTED, PAPER, SIGNED, WEIGHTS, use_style
from .tokens import token_labels

__all__ = [
    "COLORS", "INK", "MUTED", "PAPER", "SIGNED", "WEIGHTS", "use_style", "token_labels",
    "attention_map", "attention_maps", "state_map", "state_strip", "state_film", "Film", "film",
    "bracketing", "chunked_mask", "curves", "costs", "bars",
]  # fmt: skip
