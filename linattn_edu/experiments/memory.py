"""Untrained memories: pairs of random keys and values go in one by one, then the memory is asked for the values.

No layer, no training: what is measured belongs to the rules. Keys are unit vectors in R^d, values standard normal in
R^width. Two scores:

- the error, sum |answer - value|^2 / sum |value|^2 over all pairs of all trials: a ratio of sums, since the mean of
  ratios is biased upwards by width / (width - 2);
- the accuracy, how often the nearest of the values that were ever written is the right one.
"""

import torch
import torch.nn.functional as F

from linattn_edu import decay, gated_deltanet, kda, linear
from linattn_edu.experiments.registry import experiment
from linattn_edu.feature_maps import elu1
from linattn_edu.softmax import attend_at_once

SHARPNESS = 32.0
"""The scale of softmax on unit keys. At K ** -0.5 it would average over everything; here it picks."""


def recall(memory, k, v, queries, *, g=0.0, beta=1.0):
    """What a memory answers to `queries` after the pairs (k_i, v_i) were written in order.

    Args:
        memory: "additive" S + k v^T; "ELU+1" the same on features of sqrt(d) k, normalised; "softmax" over the keys;
            "decay" exp(g) S + k v^T; "delta" and "gated delta" with write strength `beta`.
        k, v: [B, N, d] and [B, N, V].
        queries: [B, M, d].
        g: log-decay of "decay" and "gated delta", one number.
        beta: write strength of the two delta rules, one number.

    Returns:
        answers [B, M, V].
    """
    if memory == "softmax":
        return attend_at_once(queries, k, v, SHARPNESS, False)
    keys, values = k[:, :, None], v[:, :, None]
    if memory == "ELU+1":
        scale = k.shape[-1] ** 0.5
        _, (S, z) = linear.chunkwise(scale * keys, scale * keys, values, output_final_state=True)
        features = elu1(scale * queries)
        return features @ S[:, 0] / (features @ z[:, 0, :, None])
    gate = torch.full(keys.shape[:-1], g if memory in ("decay", "gated delta") else 0.0, device=k.device)
    if memory in ("additive", "decay"):
        _, S = decay.chunkwise(keys, keys, values, g=gate, output_final_state=True)
    elif memory in ("delta", "gated delta"):
        strength = torch.full_like(gate, beta)
        _, S = gated_deltanet.chunkwise(keys, keys, values, g=gate, beta=strength, output_final_state=True)
    else:
        raise ValueError(
            f"`memory`: got {memory!r}, expected 'additive', 'ELU+1', 'softmax', 'decay', 'delta' or 'gated delta'"
        )
    return queries @ S[:, 0]


def random_keys(draw, B, N, d, *, cosine=0.0, device="cpu"):
    """Unit keys [B, N, d]: independent directions, or with `cosine` > 0 of about that mutual cosine."""
    common, own = (F.normalize(torch.randn(B, n, d, generator=draw), dim=-1) for n in (1, N))
    return F.normalize(cosine**0.5 * common + (1 - cosine) ** 0.5 * own, dim=-1).to(device)


def random_values(draw, B, N, width, *, device="cpu"):
    """Standard normal values [B, N, width]."""
    return torch.randn(B, N, width, generator=draw).to(device)


def relative_error(answers, values):
    """sum |answer - value|^2 / sum |value|^2."""
    return ((answers - values).square().sum() / values.square().sum()).item()


def accuracy(answers, values, right):
    """How often the nearest of `values` [B, M, V] to an answer [B, N, V] is number `right` [B, N]; ties are shared."""
    distance = torch.cdist(answers, values, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = distance <= 1.0001 * distance.amin(-1, keepdim=True)
    return (nearest.gather(-1, right[..., None])[..., 0] / nearest.sum(-1)).mean().item()


@experiment(gpu={"dims": (32, 64, 128, 256), "trials": 200})
def capacity(seed, *, device="cpu", dims=(16, 32, 64), loads=(0.25, 0.5, 1.0, 2.0, 4.0), width=32, trials=40):
    """N pairs with independent keys in R^d: the error of reading them back, against N / d.

    Result: the additive memory has error (N - 1) / d, so that the curves of all d fall on one of N / d. The delta
    rule's error is lower at every load, though with N = d it is no small one: one pass over the pairs does not solve
    for them. By accuracy the order is the other way from N = d on: the additive answer is the value plus noise, the
    delta rule's old pairs are partly erased. ELU+1 answers close to the mean of all values.

    Args:
        seed: draws keys and values.
        device: where it runs.
        dims: key dimensions d.
        loads: N / d.
        width: V.
        trials: memories that are filled, side by side.

    Returns:
        rows with memory, d, N, load, error, accuracy, and theory: (N - 1) / d.
    """
    draw, rows = torch.Generator().manual_seed(seed), []
    for d in dims:
        for load in loads:
            N = round(load * d)
            k = random_keys(draw, trials, N, d, device=device)
            v = random_values(draw, trials, N, width, device=device)
            for memory in ("additive", "delta", "ELU+1", "softmax"):
                answers = recall(memory, k, v, k)
                scores = {"error": relative_error(answers, v), "accuracy": accuracy(answers, v, in_order(v))}
                rows.append({"memory": memory, "d": d, "N": N, "load": N / d, **scores, "theory": (N - 1) / d})
    return rows


def in_order(v):
    """Answer i is right if it is value i: the numbers [B, N]."""
    return torch.arange(v.shape[1], device=v.device).expand(v.shape[:2])


WRITERS = {
    "additive": {},
    "ELU+1": {},
    "softmax": {},
    "decay 0.9": {"g": 0.9},
    "decay 0.97": {"g": 0.97},
    "delta": {},
    "delta, beta 0.5": {"beta": 0.5},
    "gated delta 0.99": {"g": 0.99},
}
"""The memories of the overwriting experiments; `g` is given as alpha = exp(g)."""


def written(name, k, v, queries):
    """`recall` for a name of `WRITERS`."""
    options = {key: torch.tensor(x).log().item() if key == "g" else x for key, x in WRITERS[name].items()}
    memory = "gated delta" if name.startswith("gated") else name.split(",")[0].split(" ")[0]
    return recall(memory, k, v, queries, **options)


@experiment(gpu={"trials": 1000})
def overwriting(seed, *, device="cpu", d=32, width=32, others=6, trials=100):
    """One key is bound to a first value, then to a second: how much of each does the answer hold?

    Result: the additive memory holds both in full, ELU+1 and softmax the mean of the two, the delta rule the second
    alone. A decay weakens the old value by its age, and with it everything else that is old.

    Args:
        seed: draws keys and values.
        device: where it runs.
        d, width: sizes of keys and values.
        others: other pairs, written between the two.
        trials: memories that are filled, side by side.

    Returns:
        rows with memory, first, second: least-squares coefficients of the answer on the two values.
    """
    draw, rows = torch.Generator().manual_seed(seed), []
    k = random_keys(draw, trials, 1 + others, d, device=device)
    v = random_values(draw, trials, 2 + others, width, device=device)
    keys = torch.cat([k, k[:, :1]], 1)
    pair = v[:, [0, -1]].mT
    for name in WRITERS:
        answer = written(name, keys, v, k[:, :1]).mT
        # One fit over all trials: the two coefficients belong to the rule, not to a trial.
        first, second = torch.linalg.lstsq(pair.reshape(-1, 2), answer.reshape(-1, 1)).solution.flatten().tolist()
        rows.append({"memory": name, "first": first, "second": second})
    return rows


@experiment(gpu={"keys": 64, "d": 128, "rebindings": (0, 1, 2, 4, 8, 16, 32)})
def rebinding(seed, *, device="cpu", keys=8, d=32, width=32, rebindings=(0, 1, 2, 4, 8, 16), trials=400):
    """Keys are bound again and again, all of them in each round, in random order: is the latest value found?

    The answer is compared with all values that were ever bound, to any key.

    Result: after 8 rebindings the additive memory finds less than one in ten: it holds all nine values of a key in
    equal parts, and does no better than to guess among them. The delta rule finds more than 95 in 100. Softmax without
    positions averages over the values of a key, and fails as well. A fixed decay helps as far as its rate suits the
    stream: 0.9 forgets a round of 8 tokens, 0.97 does not.

    Args:
        seed: draws keys, values and orders.
        device: where it runs.
        keys: number of keys.
        d, width: sizes of keys and values.
        rebindings: how often each key is bound after the first time.
        trials: memories that are filled, side by side.

    Returns:
        rows with memory, rebindings, accuracy.
    """
    draw, rows = torch.Generator().manual_seed(seed), []
    for again in rebindings:
        k = random_keys(draw, trials, keys, d, device=device)
        order = torch.rand(trials, again + 1, keys, generator=draw).argsort(-1).to(device)
        stream = k.gather(1, order.flatten(1)[..., None].expand(-1, -1, d))
        v = random_values(draw, trials, (again + 1) * keys, width, device=device)
        latest = again * keys + order[:, -1].argsort(-1)
        for name in WRITERS:
            rows.append(
                {"memory": name, "rebindings": again, "accuracy": accuracy(written(name, stream, v, k), v, latest)}
            )
    return rows


@experiment(gpu={"d": 128, "sizes": (64, 128), "trials": 200})
def correlation(seed, *, device="cpu", cosines=(0.0, 0.3, 0.6), d=32, width=32, sizes=(16, 32), trials=40):
    """Keys that resemble each other, as those of a real layer do: accuracy against their mutual cosine.

    Result: the additive memory's error grows tenfold from cosine 0 to 0.6, since all answers share the large
    direction; the delta rule's grows to at most 1.1, and beta 0.5 is the better choice for correlated keys. Accuracy
    tells less: with N = d the additive memory is ahead on independent keys and behind on correlated ones, with
    N = d / 2 the difference is small.

    Args:
        seed: draws keys and values.
        device: where it runs.
        cosines: mean cosine between two keys.
        d, width: sizes of keys and values.
        sizes: numbers of pairs N.
        trials: memories that are filled, side by side.

    Returns:
        rows with memory, cosine, N, error, accuracy.
    """
    draw, rows = torch.Generator().manual_seed(seed), []
    for cosine in cosines:
        for N in sizes:
            k = random_keys(draw, trials, N, d, cosine=cosine, device=device)
            v = random_values(draw, trials, N, width, device=device)
            for name in ("additive", "ELU+1", "delta", "delta, beta 0.5"):
                answers = written(name, k, v, k)
                scores = {"error": relative_error(answers, v), "accuracy": accuracy(answers, v, in_order(v))}
                rows.append({"memory": name, "cosine": cosine, "N": N, **scores})
    return rows


@experiment(gpu={"d": 128, "N": 64, "trials": 200})
def repetition(seed, *, device="cpu", d=32, width=32, N=16, passes=(1, 2, 4, 16), trials=40):
    """The same pairs are presented several times: does the error fall?

    Result: the delta rule's error falls to less than a hundredth in 16 passes, as gradient descent on a problem that
    has a solution (N < d). The additive memory writes every pair p times: the best that a rescaling of its answers
    can reach is the error after one pass.

    Args:
        seed: draws keys and values.
        device: where it runs.
        d, width: sizes of keys and values.
        N: number of pairs.
        passes: presentations of each pair.
        trials: memories that are filled, side by side.

    Returns:
        rows with memory, passes, error, and rescaled: the error after the best rescaling of all answers by one number.
    """
    draw, rows = torch.Generator().manual_seed(seed), []
    k = random_keys(draw, trials, N, d, device=device)
    v = random_values(draw, trials, N, width, device=device)
    for P in passes:
        for memory in ("additive", "delta"):
            answers = recall(memory, k.repeat(1, P, 1), v.repeat(1, P, 1), k)
            best = (answers * v).sum() / answers.square().sum()
            scores = {"error": relative_error(answers, v), "rescaled": relative_error(best * answers, v)}
            rows.append({"memory": memory, "passes": P, **scores})
    return rows


GATES = {"none": (1.0, 1.0), "channels": (1.0, 0.01), "all": (0.01, 0.01), "half": (0.5, 0.5)}
"""What one token keeps of the first and of the second half of the key channels."""


@experiment(gpu={"d": 256, "pairs": 64, "trials": 200})
def forgetting(seed, *, device="cpu", d=32, width=32, pairs=8, trials=40):
    """Pairs A have keys in the first half of the channels, pairs B in the second. One token with a gate is to clear B.

    Result: KDA's gate by channel clears B and leaves the error of A as it was. A scalar gate, of whatever
    size, cannot: it shrinks both answers by the same factor.

    Args:
        seed: draws keys and values.
        device: where it runs.
        d, width: sizes of keys and values.
        pairs: pairs in A and in B.
        trials: memories that are filled, side by side.

    Returns:
        rows with gate, part, error, and energy: |answers|^2 / |values|^2.
    """
    draw, rows = torch.Generator().manual_seed(seed), []
    half = [random_keys(draw, trials, pairs, d // 2, device=device) for _ in "AB"]
    k = torch.cat([F.pad(half[0], (0, d // 2)), F.pad(half[1], (d // 2, 0))], 1)
    v = random_values(draw, trials, 2 * pairs, width, device=device)
    for gate, keeps in GATES.items():
        g = torch.zeros(trials, 2 * pairs + 1, 1, d, device=device)
        g[:, -1, :, : d // 2], g[:, -1, :, d // 2 :] = (torch.tensor(keep).log() for keep in keeps)
        keys, values = (F.pad(x, (0, 0, 0, 1))[:, :, None] for x in (k, v))  # the last token writes nothing
        _, S = kda.chunkwise(
            keys, keys, values, g=g, beta=torch.ones(g.shape[:-1], device=device), output_final_state=True
        )
        for part, chosen in (("A", slice(0, pairs)), ("B", slice(pairs, None))):
            answers, wanted = k[:, chosen] @ S[:, 0], v[:, chosen]
            energy = (answers.square().sum() / wanted.square().sum()).item()
            rows.append({"gate": gate, "part": part, "error": relative_error(answers, wanted), "energy": energy})
    return rows
