"""The language model over bytes of the first chapters: softmax or linear attention, and no other part that mixes."""

from dataclasses import dataclass

from linattn_edu import validate
from linattn_edu.models.language_model import LanguageModel, LanguageModelConfig

VOCABULARY = 256
MIXERS = ("softmax", "linear")


@dataclass(frozen=True)
class ByteLMConfig:
    """Sizes of a ByteLM; `mixers` names one of softmax and linear for each layer, `rope` those whose q and k turn."""

    width: int = 64
    heads: int = 2
    mixers: tuple[str, ...] = ("softmax", "softmax", "softmax")
    hidden: int = 192
    rope: tuple[str, ...] = ("softmax",)
    rope_base: float = 10_000.0
    tied: bool = True

    def __post_init__(self):
        if self.width % (2 * self.heads):
            raise ValueError(f"`width`: got {self.width}, expected a multiple of 2 * heads = {2 * self.heads}")
        for field in ("mixers", "rope"):
            object.__setattr__(self, field, tuple(getattr(self, field)))  # JSON gives lists
            validate.names(field, getattr(self, field), MIXERS)


class ByteLM(LanguageModel):
    """p(byte_{t+1} | bytes up to t): a LanguageModel of 256 ids.

    Args:
        config: its sizes.
    """

    Config = ByteLMConfig

    def __init__(self, config):
        options = {name: {"rope_base": config.rope_base if name in config.rope else None} for name in MIXERS}
        sizes = {name: getattr(config, name) for name in ("width", "heads", "mixers", "hidden", "tied")}
        super().__init__(LanguageModelConfig(VOCABULARY, **sizes, options=options))
        self.config = config
