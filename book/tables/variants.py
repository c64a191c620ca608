"""Every variant beside every other: each property is found out by running one token, not looked up."""

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from linattn_edu import decay, deltanet, gated_deltanet, gates, gla, kda, linear, mamba, softmax

K, V = 8, 6


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_decay(x, *shape):
    """A data-dependent gate: the log-decay that a token x chooses."""
    return gates.mamba2_decay(x[:, :1], *torch.zeros(2, 1, dtype=x.dtype)).expand(1, 1) if not shape else F.logsigmoid(x)[:, None, :K]


def strength(x, widest):
    return widest * torch.sigmoid(x[:, :1])


ROWS = {
    "Linear attention": (linear, lambda x, w: dict(feature_map="identity", normalize=False), "none", r"-v_t^\top S^\top k_t"),
    "RetNet": (decay, lambda x, w: dict(g=decay.retnet_log_decay(1).to(x)[None]), "a head", r"-v_t^\top S^\top k_t"),
    "Mamba-2": (decay, lambda x, w: dict(g=log_decay(x)), "a head", r"-v_t^\top S^\top k_t"),
    "GLA": (gla, lambda x, w: dict(g=log_decay(x, K)), "a channel", r"-v_t^\top S^\top k_t"),
    "DeltaNet": (deltanet, lambda x, w: dict(beta=strength(x, w)), "none", r"\tfrac12\lVert S^\top k_t - v_t\rVert^2"),
    "Gated DeltaNet": (
        gated_deltanet, lambda x, w: dict(g=log_decay(x), beta=strength(x, w)), "a head", r"\tfrac12\lVert S^\top k_t - v_t\rVert^2"
    ),
    "KDA": (
        kda, lambda x, w: dict(g=log_decay(x, K), beta=strength(x, w)), "a channel", r"\tfrac12\lVert S^\top k_t - v_t\rVert^2"
    ),
}  # fmt: skip
"""Module, its gates as a function of the token and the widest write strength, the gate's granularity, and the loss l."""


def token(seed):
    """A token: what its gates are computed from, and its unit key."""
    return draw(1, 2 * K, seed=seed), F.normalize(draw(1, 1, K, seed=seed + 100), dim=-1)


def step(module, gate, x, k, v, S, widest=1.0):
    return module.step(k, k, v, S, **gate(x, widest))[1]


def transition(module, gate, x, k, widest=1.0):
    """The matrix that a token applies to the state: what becomes of K unit states if nothing is written."""
    units = torch.eye(K, dtype=torch.float64)[:, None, :, None]
    nothing = torch.zeros(1, 1, 1, dtype=torch.float64)
    return torch.stack([step(module, gate, x, k, nothing, unit[None], widest)[0, 0, :, 0] for unit in units], 1)


class Multiplications(TorchDispatchMode):
    """Counts the multiplications of real numbers while it is entered."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mul, torch.ops.aten.div):
            self.total += out.numel()
        elif func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            self.total += out.numel() * args[0].shape[-1]
        return out


def lowest_eigenvalue(module, gate):
    """The smallest real part that the transitions of some tokens have when beta may reach 2."""
    return min(torch.linalg.eigvals(transition(module, gate, *token(seed), widest=2.0)).real.min() for seed in range(20))


def multiplications(module, gate):
    """Of one token, in units of K V: with a large state the rest is small."""
    size = 128
    k, v, S = draw(1, 1, size), draw(1, 1, size), draw(1, 1, size, size)
    wide = {name: x if name != "g" or x.dim() == 2 else draw(1, 1, size).sigmoid().log() for name, x in gate(token(1)[0], 1.0).items()}
    with Multiplications() as counted:
        module.step(k, k, v, S, **wide)
    return round(counted.total / size**2)


def is_one_step_of_gradient_descent(module, gate, loss):
    """The new state is the decayed state minus the write strength times the gradient of the loss there."""
    (x, k), v, S = token(1), draw(1, 1, V, seed=5), draw(1, 1, K, V, seed=6)
    options = gate(x, 1.0)
    decayed = S * options["g"].exp().reshape(1, 1, -1, 1) if "g" in options else S
    decayed.requires_grad_()
    recalled = (decayed * k[..., None]).sum(-2)
    value = ((recalled - v).square().sum() / 2) if "lVert" in loss else -(recalled * v).sum()
    (gradient,) = torch.autograd.grad(value, decayed)
    rate = options.get("beta", torch.ones(1, 1, dtype=torch.float64))[..., None, None]
    return torch.allclose(step(module, gate, x, k, v, S), decayed - rate * gradient)


def yes(answer):
    return "yes" if answer else "no"


def table():
    """The rows of the quick reference."""
    rows = [["Variant", r"$\ell_t(S)$", "Gate", "Data", "Eigenvalues", "Below 0", "Commute", "Products"]]
    for name, (module, gate, granularity, loss) in ROWS.items():
        A, B = (transition(module, gate, *token(seed)) for seed in (1, 2))
        values = torch.linalg.eigvals(A).real
        spread = f"{values.min():.2f} to {values.max():.2f}" if values.max() - values.min() > 1e-9 else f"{values.max():.2f}"
        assert is_one_step_of_gradient_descent(module, gate, loss), name
        rows.append([
            name, f"${loss}$", granularity, yes(not torch.allclose(A, B)), spread, yes(lowest_eigenvalue(module, gate) < 0),
            yes(torch.allclose(A @ B, B @ A)), f"{multiplications(module, gate)} $KV$",
        ])  # fmt: skip
    return [*rows, mamba_row()]


def mamba_row():
    """Mamba's row, one channel of N states: its transition is a vector of decays."""
    N = 128
    A = -draw(1, N, seed=1).exp()
    B, h = draw(1, N, seed=2), draw(1, 1, N, seed=3)
    u, delta = draw(1, 1, seed=4), draw(1, 1, seed=5).exp()
    decays = [mamba.step(0 * u, delta * seed, A, B, B, h)[1] / h for seed in (1, 2)]
    with Multiplications() as counted:
        mamba.step(u, delta, A, B, B, h)
    written = mamba.step(u, delta, A, B, B, h)[1] - decays[0] * h
    assert torch.allclose(written, delta * u * B)
    return [
        "Mamba", r"$-u_t B_t^\top h$", "an entry", yes(not torch.allclose(*decays)),
        f"{decays[0].min():.2f} to {decays[0].max():.2f}", yes(min(x.min() for x in decays) < 0), "yes", f"{counted.total / N:.0f} $N$",
    ]  # fmt: skip


def sizes():
    """Numbers that one head keeps after 1,000 tokens, counted from the state that each module returns."""
    T, K, V, N = 1000, 128, 128, 16
    q, k, v = (draw(1, T, 1, size).float() for size in (K, K, V))
    kept = {
        "Softmax attention": softmax.chunkwise(q, k, v, output_final_state=True)[1],
        "Linear attention with normaliser": linear.chunkwise(q, k, v, output_final_state=True)[1],
        "RetNet, Mamba-2, GLA, DeltaNet, Gated DeltaNet, KDA": deltanet.chunkwise(
            q, F.normalize(k, dim=-1), v, beta=torch.ones(1, T, 1), output_final_state=True
        )[1],
        f"Mamba, for {V} channels": mamba.recurrent(
            v[:, :, 0], torch.ones(1, T, V), -torch.ones(V, N), k[:, :, 0, :N], k[:, :, 0, :N], output_final_state=True
        )[1],
    }
    rows = [["Kept for one head", "Tensors", "Numbers", "Bytes"]]
    for name, state in kept.items():
        tensors = state if isinstance(state, tuple) else (state,)
        shapes = " and ".join(" × ".join(f"{n:,}" for n in x.shape if n > 1) for x in tensors)
        rows.append([name, shapes, f"{sum(x.numel() for x in tensors):,}", f"{sum(x.nbytes for x in tensors):,}"])
    return rows
