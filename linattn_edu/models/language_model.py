"""A plain language model: any mixer in any layer."""

from dataclasses import dataclass, field

from torch import nn

from linattn_edu import layers, validate
from linattn_edu.models.causal_lm import Block, CausalLM

MIXERS = {
    "softmax": layers.SoftmaxAttention,
    "gated_attention": layers.GatedAttention,
    "latent_attention": layers.LatentAttention,
    "linear": layers.LinearAttention,
    "retention": layers.Retention,
    "gla": layers.GatedLinearAttention,
    "deltanet": layers.DeltaNet,
    "gated_deltanet": layers.GatedDeltaNet,
    "kda": layers.KimiDeltaAttention,
    "mamba": layers.Mamba,
    "mamba2": layers.Mamba2,
}
"""The layers that mix tokens, by the name that a configuration gives them."""

WITHOUT_HEADS = ("mamba", "mamba2")  # which take their number from other sizes
NORMS = {"rms": lambda width: layers.RMSNorm(width, eps=1e-6), "layer": nn.LayerNorm}


@dataclass(frozen=True)
class LanguageModelConfig:
    """Sizes of a LanguageModel.

    Attributes:
        vocabulary: number of ids.
        width: D.
        heads: heads of every mixer that has some.
        mixers: a name in `MIXERS` for each layer, first layer first.
        hidden: width of the SwiGLU layers.
        options: further arguments of a mixer's layer, by its name: `{"kda": {"conv_size": None}}`.
        tied: the head's weight is the embedding's.
        norm: "rms" or "layer" (with bias).
        layer_scale: first value of a scale by channel on each branch (`LayerScale`); none if None.

    Raises:
        ValueError: an unknown name.
    """

    vocabulary: int = 256
    width: int = 64
    heads: int = 2
    mixers: tuple[str, ...] = ("softmax", "softmax", "softmax")
    hidden: int = 192
    options: dict[str, dict] = field(default_factory=dict)
    tied: bool = True
    norm: str = "rms"
    layer_scale: float | None = None

    def __post_init__(self):
        object.__setattr__(self, "mixers", tuple(self.mixers))  # JSON gives a list
        validate.names("mixers", self.mixers, MIXERS)
        validate.names("options", self.options, MIXERS)
        validate.names("norm", [self.norm], NORMS)


class LanguageModel(CausalLM):
    """Pre-norm blocks of one mixer and one SwiGLU each.

    Args:
        config: the sizes, and the mixer of each layer.
    """

    Config = LanguageModelConfig

    def __init__(self, config):
        def norm():
            return NORMS[config.norm](config.width)

        def scale():
            if config.layer_scale is None:
                return nn.Identity()
            return layers.LayerScale(config.width, initial=config.layer_scale)

        def mixer(name):
            sizes = (config.width,) if name in WITHOUT_HEADS else (config.width, config.heads)
            return MIXERS[name](*sizes, **config.options.get(name, {}))

        blocks = (Block(mixer(name), layers.SwiGLU(config.width, config.hidden), norm, scale) for name in config.mixers)
        super().__init__(config, blocks, norm())

    def qkv(self, ids):
        """What the operators of all layers see of a text, first layer first: (q, k, v), each [B, T, H, K].

        Raises:
            AttributeError: a mixer that does not tell; softmax, gated and linear attention do.
        """
        seen, x = [], self.embedding(ids)
        for block in self.blocks:
            seen.append(block.mixer.qkv(block.mixer_norm(x)))
            x, _ = block(x)
        return seen
