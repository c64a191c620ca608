"""Mixture of experts: many feed-forward layers, of which a token uses a few.

    y = sum_{e chosen} w_e FFN_e(x) + FFN_shared(x)

The parameters grow with the number of experts, the work of a token with the number chosen.
"""

import torch
import torch.nn.functional as F
from torch import nn

from linattn_edu import validate
from linattn_edu.forms import computing_dtype, full_precision
from linattn_edu.layers.swiglu import SwiGLU, gated


class Router(nn.Module):
    """Which experts a token uses, and how much of each.

        scoring="softmax":  s = softmax(W x),   chosen = the top_k largest s_e
        scoring="sigmoid":  s = sigmoid(W x),   chosen = the top_k largest s_e + b_e
        w_e = s_e,  divided by the sum of the chosen s_e if `renormalize`,  times `scale`

    b, the buffer `correction_bias`, steers the choice and never the weights, so that no gradient has to trade balance
    against the loss; `rebalance` moves it. With `groups` > 1 the experts lie in equal groups, a group is worth the sum
    of its two best s_e + b_e, and only experts of the `top_groups` best groups can be chosen.

    Args:
        width: D, channels of x.
        experts: E.
        top_k: experts a token uses, out of its `top_groups` groups.
        scoring: "softmax" or "sigmoid".
        renormalize: make the weights sum to 1, before the scale.
        scale: factor of all weights.
        groups, top_groups: see above.

    Raises:
        ValueError: a wrong name or number.

    Scores are computed in at least float32. Source: Dai et al. 2024, DeepSeekMoE (softmax); DeepSeek-AI 2024,
    DeepSeek-V3 (sigmoid, b, groups).
    """

    def __init__(
        self, width, experts, top_k, *, scoring="softmax", renormalize=True, scale=1.0, groups=1, top_groups=1,
    ):  # fmt: skip
        super().__init__()
        if scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"`scoring`: got {scoring!r}, expected 'softmax' or 'sigmoid'")
        width, experts = validate.count("width", width), validate.count("experts", experts)
        groups, top_groups = validate.count("groups", groups), validate.count("top_groups", top_groups)
        if experts % groups or top_groups > groups:
            raise ValueError(
                f"`groups`, `top_groups`: got {groups} and {top_groups}, expected a divisor of the {experts} experts "
                "and a number from 1 to it"
            )
        self.top_k = validate.count("top_k", top_k, most=top_groups * (experts // groups))
        self.scoring, self.renormalize, self.scale = scoring, renormalize, validate.number("scale", scale)
        self.groups, self.top_groups = groups, top_groups
        self.weight = nn.Parameter(torch.empty(experts, width))
        nn.init.normal_(self.weight, std=width**-0.5)
        self.register_buffer("correction_bias", torch.zeros(experts) if scoring == "sigmoid" else None)

    def forward(self, x):
        """x [n, D] -> weights [n, top_k] in at least float32, and the numbers of the chosen experts [n, top_k]."""
        dtype = computing_dtype(x)
        with full_precision(x):
            logits = F.linear(x.to(dtype), self.weight.to(dtype))
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        chosen = self._preference(scores).topk(self.top_k, -1).indices
        weights = scores.gather(-1, chosen)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return self.scale * weights, chosen

    def _preference(self, scores):
        """What the choice goes by: the scores, corrected by b, without the experts of the lesser groups."""
        if self.correction_bias is not None:
            scores = scores + self.correction_bias
        if self.groups == 1:
            return scores
        grouped = scores.unflatten(-1, (self.groups, -1))
        worth = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        best = worth.topk(self.top_groups, -1).indices
        lesser = torch.ones_like(worth, dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(lesser[..., None], -torch.inf).flatten(-2)

    @torch.no_grad()
    def rebalance(self, chosen, *, rate=1e-3):
        """b_e += rate * sign(mean load - load of e), the load being how often the expert was chosen.

        Args:
            chosen: numbers of experts, of any shape, as `forward` returned them for a batch.
            rate: the step.

        Raises:
            ValueError: a router with softmax scores, which has no b.

        Source: Wang et al. 2024 (2408.15664).
        """
        if self.correction_bias is None:
            raise ValueError("`scoring`: got 'softmax', expected 'sigmoid' for a router with a correction")
        load = torch.bincount(chosen.flatten(), minlength=len(self.weight)).to(self.correction_bias.dtype)
        self.correction_bias += rate * (load.mean() - load).sign()


class MixtureOfExperts(nn.Module):
    """y = sum_{e chosen} w_e FFN_e(x) + u FFN_shared(x), with SwiGLU experts; u = sigmoid(<a, x>) or 1.

    Args:
        width: D, channels of x [..., D] and of the result.
        hidden: width of an expert's product.
        experts: E, of which `top_k` are used.
        top_k: experts a token uses.
        shared: hidden width of the expert that every token uses; none if 0.
        shared_gate: let the token scale its shared expert by u (Qwen3-Next).
        routing: the other arguments of `Router`.

    Raises:
        ValueError: a wrong name or number.

    No token is dropped: an expert takes all that choose it. Source: Dai et al. 2024, DeepSeekMoE (2401.06066).
    """

    def __init__(self, width, hidden, experts, top_k, *, shared=0, shared_gate=False, **routing):
        super().__init__()
        self.router = Router(width, experts, top_k, **routing)
        hidden, shared = validate.count("hidden", hidden), validate.count("shared", shared, least=0)
        self.up = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        self.shared = SwiGLU(width, shared) if shared else None
        self.shared_gate = nn.Linear(width, 1, bias=False) if shared and shared_gate else None

    def forward(self, x):
        y = self.routed(x.flatten(0, -2)).view_as(x)
        if self.shared is None:
            return y
        shared = self.shared(x)
        return y + (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared)

    def routed(self, x):
        """x [n, D] -> [n, D]: tokens sorted by expert, each expert on its own tokens, the results put back in order."""
        weights, chosen = self.router(x)
        order = chosen.flatten().argsort(stable=True)
        load = torch.bincount(chosen.flatten(), minlength=len(self.up)).tolist()
        inputs = x[order // self.router.top_k].split(load)
        experts = zip(inputs, self.up, self.down)
        outputs = [F.linear(gated(F.linear(x_e, up)), down) for x_e, up, down in experts if len(x_e)]
        outputs = torch.cat([x[:0], *outputs])[order.argsort()].view(*chosen.shape, x.shape[-1])
        return (weights[..., None] * outputs).sum(1).to(x.dtype)
