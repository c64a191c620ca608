"""What the language models share: the block, the way from ids to logits, sizes, and files.

    x -> x + mixer(norm(x)) -> x + mlp(norm(x))         one block
    ids -> embedding -> blocks -> norm -> head          the model
"""

import dataclasses
import json

import torch
from torch import nn

from linattn_edu import validate
from linattn_edu.extras import need
from linattn_edu.layers import MixtureOfExperts
from linattn_edu.models import generation


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)).

    Args:
        mixer: a layer that mixes tokens, with a cache.
        mlp: a layer that treats each token by itself.
        norm: a function of no arguments that makes a norm.
        scale: the same for a scale of each of the two branches, such as `LayerScale`; none if None.
    """

    def __init__(self, mixer, mlp, norm, scale=nn.Identity):
        super().__init__()
        self.mixer_norm, self.mixer, self.mixer_scale = norm(), mixer, scale()
        self.mlp_norm, self.mlp, self.mlp_scale = norm(), mlp, scale()

    def forward(self, x, *, cache=None, mask=None, cu_seqlens=None):
        y, cache = self.mixer(self.mixer_norm(x), cache=cache, mask=mask, cu_seqlens=cu_seqlens)
        x = x + self.mixer_scale(y)
        return x + self.mlp_scale(self.mlp(self.mlp_norm(x))), cache


class CausalLM(nn.Module):
    """p(id_{t+1} | ids up to t): blocks between an embedding and a head.

    Args:
        config: a dataclass with `vocabulary`, `width` and `tied` (the head's weight is the embedding's) at least.
        blocks: the blocks, first layer first.
        norm: what x passes before the head.

    Attributes:
        Config: the class of the configuration.
    """

    Config = None

    def __init__(self, config, blocks, norm):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._initialize()
        if config.tied:
            self.head.weight = self.embedding.weight

    @torch.no_grad()
    def _initialize(self):
        """Normal weights that keep the variance; what is added to the stream starts small (GPT-2)."""
        shrink = (2 * len(self.blocks)) ** -0.5
        for path, module in self.named_modules():
            name = path.rpartition(".")[2]
            if isinstance(module, (nn.Linear, nn.Embedding)) and name != "dt_proj":  # which Mamba starts in its own way
                added = name in ("o_proj", "down")
                module.weight.normal_(std=module.weight.shape[1] ** -0.5 * (shrink if added else 1.0))
            elif isinstance(module, MixtureOfExperts):
                module.down.normal_(std=module.down.shape[-1] ** -0.5 * shrink)

    def hidden(self, ids, cache=None, *, mask=None, cu_seqlens=None):
        """What the head reads: ids -> x [B, T, D], and the cache; the arguments are those of `forward`."""
        validate.token_ids(ids)
        cache = [None] * len(self.blocks) if cache is None else cache
        if len(cache) != len(self.blocks):
            raise ValueError(f"`cache`: got one of {len(cache)} layers, expected the {len(self.blocks)} of this model")
        x, new = self.embedding(ids), []
        for block, old in zip(self.blocks, cache):
            x, remembered = block(x, cache=old, mask=mask, cu_seqlens=cu_seqlens)
            new.append(remembered)
        return self.norm(x), tuple(new)

    def forward(self, ids, cache=None, *, mask=None, cu_seqlens=None):
        """Logits of the next id after each token.

        Args:
            ids: [B, T] int64 or int32.
            cache: what an earlier call returned, a `Cache` a layer; None at the beginning of the sequences.
            mask: [B, T] bool, True for a real token. Padding may stand anywhere; the logits there mean nothing.
            cu_seqlens: integers [N+1], the bounds of N sequences packed into one row (B = 1).

        Returns:
            logits [B, T, vocabulary], and the new cache.

        Raises:
            ValueError: a wrong shape or dtype, or a cache of another model.
            TypeError: ids that are no tensor.
        """
        x, cache = self.hidden(ids, cache, mask=mask, cu_seqlens=cu_seqlens)
        return self.head(x), cache

    def stream(self, ids, **options):
        """The next ids of each row, one after another; see `models.stream`."""
        return generation.stream(self, ids, **options)

    def generate(self, ids, **options):
        """The ids and their continuation; see `models.generate`."""
        return generation.generate(self, ids, **options)

    # Sizes.

    @property
    def parameters_total(self):
        """Number of parameters; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())

    @property
    def parameters_active(self):
        """Number of parameters that a token meets: of each mixture of experts those that it chooses, of the embedding
        its own row, unless the head reads the whole of it.
        """
        idle = 0 if self.config.tied else self.embedding.weight[1:].numel()
        for moe in (m for m in self.modules() if isinstance(m, MixtureOfExperts)):
            unused = len(moe.up) - moe.router.top_k
            idle += unused * (moe.up[0].numel() + moe.down[0].numel())
        return self.parameters_total - idle

    def cache_bytes(self, T):
        """Memory of the cache of one sequence of T tokens in the dtype of the model, in bytes.

        Recurrent layers keep their state in float32, whatever the dtype, and as much at T = 0 as later.
        """
        return sum(block.mixer.cache_bytes(T, dtype=self.embedding.weight.dtype) for block in self.blocks)

    def break_even(self, other):
        """The fewest tokens from which on this model's cache is no larger than that of `other`; None if there are none.

        Args:
            other: a model.
        """
        more = self.cache_bytes(0) - other.cache_bytes(0)
        saved = more - (self.cache_bytes(1) - other.cache_bytes(1))  # by each token, of which all cost the same
        if more <= 0 <= saved:
            return 0
        return -(-more // saved) if saved > 0 else None

    # Files.

    def save(self, path):
        """Write weights and configuration to `path`, a safetensors file.

        Raises:
            ValueError: an option that no file can hold, as a function for a feature map.
            ImportError: safetensors is missing.
        """
        save_file = need("safetensors.torch", "`save`").save_file
        config = json.dumps(dataclasses.asdict(self.config), default=_refuse)
        weights = {name: x.contiguous() for name, x in self.state_dict().items()}
        if self.config.tied:
            del weights["head.weight"]
        save_file(weights, path, {"model": type(self).__name__, "config": config})

    @classmethod
    def load(cls, path, *, device="cpu"):
        """The model that `save` wrote, in eval mode.

        Args:
            path: the file.
            device: where its weights go.

        Raises:
            ValueError: the file holds a model of another class.
            ImportError: safetensors is missing.
        """
        with need("safetensors", "`load`").safe_open(path, framework="pt", device=str(device)) as file:
            about = file.metadata() or {}
            if about.get("model") != cls.__name__:
                raise ValueError(f"`path`: got a file of the model {about.get('model')}, expected {cls.__name__}")
            weights = {name: file.get_tensor(name) for name in file.keys()}
        return cls.from_weights(cls.Config(**json.loads(about["config"])), weights)

    @classmethod
    def from_weights(cls, config, weights):
        """A model in eval mode that takes the tensors `weights` for its own, each in its dtype."""
        with torch.device("meta"):
            model = cls(config)
        if config.tied:
            weights = weights | {"head.weight": weights["embedding.weight"]}
        model.load_state_dict(weights, assign=True)
        if config.tied:
            model.head.weight = model.embedding.weight
        return model.eval()


def _refuse(x):
    raise ValueError(
        f"`config`: got {validate.describe(x)} in it, expected what a file can hold, names and plain numbers: "
        "name the feature map, or keep the weights by torch.save(model.state_dict(), path)"
    )
