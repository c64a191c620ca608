"""Linear attention: softmax's exp(q^T k) replaced by phi(q)^T phi(k), so that the sum over the past is a matrix.

    S_t = S_{t-1} + phi(k_t) v_t^T        z_t = z_{t-1} + phi(k_t)
    o_t = S_t^T phi(q_t) / (z_t^T phi(q_t) + eps)

Source: Katharopoulos et al. 2020, eqs. 8-12 (there S_i, Z_i, and outputs as rows). Without the normaliser,
o_t = scale * S_t^T phi(q_t): the form that RetNet, GLA, Mamba-2 and the delta family start from.

D is the width of phi(k). The normaliser needs no formula of its own: z is what S would hold for a value channel that
is always 1, so v enters with a column of ones and leaves divided by it.
"""

import torch

from linattn_edu import validate
from linattn_edu.algebra import outer, read
from linattn_edu.feature_maps import FEATURE_MAPS, identity
from linattn_edu.feature_maps import feature_map as named_feature_map
from linattn_edu.forms import Operator, Plain, computing_dtype, full_precision, share_heads


def update(q, k, v, S):
    """S_t = S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t,   with phi(q), phi(k) for q, k."""
    S = S + outer(k, v)
    return read(S, q), S


def intra(q, k, v):
    """In a block Q, K, V that starts from the state S, with the causal mask M:

    O = (Q K^T * M) V + Q S,   S' = S + K^T V.
    """
    return (q @ k.mT).tril() @ v, q, k.mT @ v


def inter(o, q, kv, S):
    return o + q @ S, S + kv


class FeatureSpace(Plain):
    """q and k enter through the feature map, v with a column of ones if the output is to be normalised."""

    ABOUT = """feature_map: a name in `feature_maps.FEATURE_MAPS`, or a callable on the last axis, K -> D.
    It gets float32, or float64 for float64 inputs, a module the dtype of its weights.
normalize: divide by z_t^T phi(q_t) + eps.
eps: keeps that division finite where all features are zero.
scale: without `normalize` the factor of the output, K ** -0.5 if None; with it the factor cancels, so that one raises."""
    STATE = "the tuple S [N, HV, D, V], z [N, HV, D]; without `normalize` S alone"

    def __init__(self, *, feature_map="elu1", normalize=True, eps=1e-6):
        validate.flag("normalize", normalize)
        self.phi, self.normalize, self.eps = named_feature_map(feature_map), normalize, validate.number("eps", eps)
        self.name = next((name for name, phi in FEATURE_MAPS.items() if phi is self.phi), None)
        if self.eps < 0:
            raise ValueError(f"`eps`: got {eps}, expected a number of at least 0")

    def scale(self, scale, K):
        if not self.normalize:
            return super().scale(scale, K)
        if scale is not None:
            raise ValueError(f"`scale`: got {scale}, expected None: with `normalize` a scale cancels")
        return 1

    def features(self, x, name):
        weights = self.phi.parameters() if isinstance(self.phi, torch.nn.Module) else ()
        like = next((w for w in weights if w.is_floating_point()), x)
        y = self.phi(x.to(like.dtype))
        if not isinstance(y, torch.Tensor) or y.shape[:-1] != x.shape[:-1]:
            raise ValueError(
                f"`feature_map`: got {validate.describe(y)} for a `{name}` of shape {list(x.shape)}, "
                "expected a tensor that differs in the last axis alone"
            )
        return y.to(x.dtype)

    def enter(self, q, k, v, scale):
        if self.normalize:
            v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        return scale * self.features(q, "q"), self.features(k, "k"), v

    def leave(self, o):
        return o[..., :-1] / (o[..., -1:] + self.eps) if self.normalize else o

    def kernel_inputs(self, q, k, v):
        """Features in bfloat16 for bfloat16 inputs; else in float32, since sums of features can pass float16's range."""
        if self.phi is identity and not self.normalize:
            return q, k, v
        dtype = q.dtype if q.dtype == torch.bfloat16 else torch.float32
        return tuple(x.to(dtype) for x in self.enter(q.float(), k.float(), v.float(), 1))

    def kernel_features(self, q, k):
        from linattn_edu.kernels.step import MAPS

        if self.name in MAPS:
            return q, k, self.name
        with full_precision(q):
            return self.features(q.float(), "q"), self.features(k.float(), "k"), "identity"

    def bind_width(self, sizes, q):
        """Bind D; a map of one's own is asked."""
        width = sizes["K"]
        if self.name is None:
            with torch.no_grad():
                one_token = q.new_zeros(1, *[1] * (q.dim() - 3), sizes["H"], sizes["K"], dtype=computing_dtype(q))
                width = self.features(one_token, "k").shape[-1]
        sizes.bind("D", width, "`feature_map`")

    def checked(self, state, sizes, like, name):
        self.bind_width(sizes, like[1])
        if not self.normalize:
            validate.floating_tensor(name, state, "N HV D V", sizes, like=like)
            return [state]
        if not isinstance(state, tuple) or len(state) != 2:
            raise TypeError(f"`{name}`: got {validate.describe(state)}, expected the tuple (S, z)")
        S, z = state
        validate.floating_tensor(f"{name}[0]", S, "N HV D V", sizes, like=like)
        validate.floating_tensor(f"{name}[1]", z, "N HV D", sizes, like=like)
        return [S, z]

    def state_in(self, state, sizes, like, name="initial_state"):
        dtype = computing_dtype(like[1])
        if state is None:
            self.bind_width(sizes, like[1])
            N, HV, D, V = (sizes[x] for x in ("N", "HV", "D", "V"))
            return like[1].new_zeros(N, HV, D, V + self.normalize, dtype=dtype)
        S, *z = self.checked(state, sizes, like, name)
        return torch.cat([S.to(dtype), z[0].to(dtype)[..., None]], -1) if z else S.to(dtype)

    def state_out(self, S):
        return (S[..., :-1], S[..., -1]) if self.normalize else S


operator = Operator(update, intra, inter, space=FeatureSpace, source="Katharopoulos et al. 2020, eqs. 8-12.")
recurrent, parallel, chunkwise, fused, step = operator.forms(__name__)


@validate.named
def bidirectional(q, k, v, *, feature_map="elu1", normalize=True, eps=1e-6, scale=None):
    """Every token reads the whole sequence, later tokens included: for encoders, not for a decoder's training.

    o_t = S^T phi(q_t) / (z^T phi(q_t) + eps),   S = sum_i phi(k_i) v_i^T,   z = sum_i phi(k_i).

    One pair (S, z) serves all tokens: O(T D V) time, no T x T matrix. It is not the training form of the causal
    operator, whose S_t and z_t differ from token to token: the two agree at the last token only.

    Args:
        q, k: [B, T, H, K]; q, k and v share one floating dtype.
        v: [B, T, HV, V]; value head i reads query/key head i // (HV // H).
        feature_map, normalize, eps, scale: as in `recurrent`.

    Returns:
        o [B, T, HV, V] in the dtype of v, and None in the place of a state.

    Source: Katharopoulos et al. 2020, eqs. 4-6.
    """
    options = {"feature_map": feature_map, "normalize": normalize, "eps": eps}
    space, sizes, _ = operator.check(q, k, v, options)
    scale = space.scale(scale, sizes["K"])
    with full_precision(q):
        q, k, x = space.enter(*(x.to(computing_dtype(q)) for x in (q, k, v)), scale)
        q, k = share_heads(q, k, sizes["HV"])
        q, k, x = (y.transpose(1, 2) for y in (q, k, x))
        o = (q @ (k.mT @ x)).transpose(1, 2)
    return space.leave(o).to(v.dtype), None
