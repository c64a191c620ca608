"""From one update rule to its five forms.

A variant is written as three formulas on plain matrices, and everything else follows from them:

    update(q, k, v, *gates, S) -> (o, S)     one token: q, k [..., K], v [..., V], S [..., K, V]
    intra(q, k, v, *gates) -> tensors        a block of C tokens before its incoming state is known: q, k [..., C, K]
    inter(*tensors, S) -> (o, S)             the same block once the state has arrived

`recurrent` folds `update` over the tokens; `chunkwise` computes `intra` of many blocks at once and folds `inter` over
them; `parallel` is one block of T tokens. What the formulas need not know is done here, once: checks, dtypes, the
scale of q, grouped value heads, packed sequences, ragged lengths, segments that bound the memory.
"""

import contextlib
import inspect
from functools import partial

import torch
import torch.nn.functional as F

from linattn_edu import kernels, validate
from linattn_edu.docstrings import document
from linattn_edu.validate import Sizes

SEGMENT = 1024
"""Tokens that are upcast, padded and cut into blocks together: working memory does not grow with T, and a CPU's cache
holds it.
"""


class Plain:
    """How q, k, v and the state enter the formulas and leave them: as they are, q times the scale."""

    ABOUT = "scale: factor of the output, K ** -0.5 if None."
    STATE = "[N, HV, K, V], row i belongs to key channel i"
    normalize, eps = False, 0.0

    def scale(self, scale, K):
        if scale is None:
            return K**-0.5
        return validate.number("scale", scale)

    def enter(self, q, k, v, scale):
        return scale * q, k, v

    def leave(self, o):
        return o

    def kernel_inputs(self, q, k, v):
        """q, k and v as the kernels take them, which multiply by the scale themselves."""
        return q, k, v

    def kernel_features(self, q, k):
        """q and k as the step kernel takes them, and the feature map that is left to it."""
        return q, k, "identity"

    def checked(self, state, sizes, like, name):
        """The tensors of a state as given, `[S]` or `[S, z]`. `like` is (name of q, q)."""
        validate.floating_tensor(name, state, "N HV K V", sizes, like=like)
        return [state]

    def state_in(self, state, sizes, like, name="initial_state"):
        """The state as the one tensor that the formulas carry: checked and upcast, or zero."""
        _, q = like
        if state is None:
            return q.new_zeros([sizes[x] for x in ("N", "HV", "K", "V")], dtype=computing_dtype(q))
        [state] = self.checked(state, sizes, like, name)
        return state.to(computing_dtype(q))

    def state_out(self, S):
        """The state as the caller sees it."""
        return S


def computing_dtype(x):
    """The dtype of all arithmetic and of the state: float64 for float64 inputs, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def fold(f, S, xs):
    """Apply `(o, S) = f(*x, S)` along axis 0 of `xs`: all outputs, and the last state."""
    outputs = []
    for x in zip(*xs):
        o, S = f(*x, S)
        outputs.append(o)
    return outputs, S


def by_token(update, xs, S):
    """Fold `update` over the tokens of `xs`, tensors `[B, T, HV, ...]`; the output is `[B, T, HV, V]`."""
    o, S = fold(update, S, [x.movedim(1, 0) for x in xs])
    return torch.stack(o, 1), S


def by_block(intra, inter, C, xs, S):
    """`intra` of all blocks of `C` tokens at once, then `inter` folded over the blocks.

    The last block is filled up with zeros. A token whose key, value, write strength and log-decay are zero leaves the
    state as it is, so padding changes no result.
    """
    T = xs[0].shape[1]
    C = min(C or T, T)
    blocks = []
    for x in xs:
        padded = F.pad(x, [0, 0] * (x.dim() - 2) + [0, -T % C]) if T % C else x
        # [B, T, HV, ...] -> [blocks, B, HV, C, ...]
        blocks.append(padded.unflatten(1, (-1, C)).movedim(3, 1).movedim(2, 0).contiguous())
    o, S = fold(inter, S, intra(*blocks))
    return torch.cat([x.transpose(1, 2) for x in o], 1)[:, :T], S


def by_segment(method, enter, leave, segment, xs, S):
    """Run `method` over one sequence, `segment` tokens at a time, in the dtype of the state."""
    T, dtype = xs[0].shape[1], xs[2].dtype
    if T == 0:
        nothing = sum(x[:, :0].to(S.dtype).sum() for x in (*xs, S))  # 0, and part of every input's graph
        return (xs[2].to(S.dtype) + nothing).to(dtype), S + nothing
    outputs = []
    for piece in zip(*(x.split(min(segment or T, T), 1) for x in xs)):
        o, S = method(enter(*(x.to(S.dtype) for x in piece)), S)
        outputs.append(leave(o).to(dtype))
    return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0].contiguous(), S


def by_sequence(run, bounds, xs, S):
    """Run each packed sequence from its own state, and before them a sequence of no tokens: there may be no other."""
    outputs, states = ([x] for x in run([x[:, :0] for x in xs], S[:0]))
    for n, (start, stop) in enumerate(zip(bounds, bounds[1:])):
        o, S_n = run([x[:, start:stop] for x in xs], S[n : n + 1])
        outputs.append(o)
        states.append(S_n)
    return torch.cat(outputs, 1), torch.cat(states)


def share_heads(q, k, HV):
    """Give value head i its own copy of query/key head i // (HV // H); heads are the last axis but one."""
    group = HV // q.shape[-2]
    return (q, k) if group == 1 else (q.repeat_interleave(group, -2), k.repeat_interleave(group, -2))


def full_precision(x):
    """Keep an enclosing `torch.autocast` from lowering the dtype of the formulas."""
    return torch.autocast(x.device.type, enabled=False) if validate.autocasting(x) else contextlib.nullcontext()


def kind_of(*values):
    """All that checks of these arguments look at, as a key: shape, dtype and device of a tensor; None if it is no key.

    What may hold weights is none, since a key would keep them alive: a callable other than a function without a closure.
    Nor is anything under torch.func, where a tensor is not what it seems.
    """
    if torch.compiler.is_compiling() or kernels.transformed():
        return None
    if any(callable(x) and getattr(x, "__closure__", x) is not None for x in values):
        return None
    kind = tuple((x.shape, x.dtype, x.device) if isinstance(x, torch.Tensor) else (type(x), x) for x in values)
    try:
        hash(kind)
    except TypeError:
        return None
    return kind


def overwrite(state, new):
    """Copy a new state into the memory of the old one, if all of it has the right dtype."""
    several = isinstance(new, tuple)
    pairs = list(zip(state, new)) if several else [(state, new)]
    for i, (old, x) in enumerate(pairs):
        if old.dtype != x.dtype:
            name = f"state[{i}]" if several else "state"
            raise ValueError(f"`{name}`: got dtype {old.dtype}, expected {x.dtype} to be updated in place")
    for old, x in pairs:
        old.copy_(x)
    return state


class Operator:
    """An update rule and the forms that follow from it.

    `gates` maps each gate argument to its axes: "B T HV K", or "B T HV or HV" where one constant a head will do.
    The keyword arguments of `space` become options of every form. `source` names paper and equation.
    """

    def __init__(self, update, intra, inter, *, source, gates=None, space=Plain):
        self.update, self.intra, self.inter = update, intra, inter
        self.gates, self.space, self.source = gates or {}, space, source
        self.plans = {}

    def recurrent(self, q, k, v, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, **named):
        method = partial(by_token, self.update)
        return self._run(method, SEGMENT, q, k, v, named, scale, initial_state, output_final_state, cu_seqlens)

    def parallel(self, q, k, v, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, **named):
        method = partial(by_block, self.intra, self.inter, None)
        return self._run(method, None, q, k, v, named, scale, initial_state, output_final_state, cu_seqlens)

    def chunkwise(
        self, q, k, v, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=64, **named
    ):
        chunk_size = validate.count("chunk_size", chunk_size)
        method = partial(by_block, self.intra, self.inter, chunk_size)
        segment = max(SEGMENT // chunk_size, 1) * chunk_size
        return self._run(method, segment, q, k, v, named, scale, initial_state, output_final_state, cu_seqlens)

    def fused(
        self,
        q,
        k,
        v,
        *,
        scale=None,
        initial_state=None,
        output_final_state=False,
        cu_seqlens=None,
        chunk_size=64,
        backend=None,
        **named,
    ):
        chunk_size = validate.count("chunk_size", chunk_size)
        if kernels.wanted(backend, q):
            kind = kind_of(q, k, v, *named.values(), scale, output_final_state)
            space, factor, sizes = self.plans.get(kind) or self._plan_fused(kind, q, k, v, named, scale, output_final_state)
            sizes = sizes.copy()
            N = sizes["B"] if cu_seqlens is None else validate.sequence_count(cu_seqlens, sizes, q.device)
            sizes.bind("N", N, "`q`" if cu_seqlens is None else "`cu_seqlens`")
            S = None if initial_state is None else space.state_in(initial_state, sizes, ("q", q))
            with full_precision(q):
                xs = space.kernel_inputs(q, k, v)
                if kernels.serve(backend, q, xs[1].shape[-1], xs[2].shape[-1]):
                    gates = {name: named[name] for name in self.gates}
                    gates = {name: g if g.dim() > 1 else g.expand(v.shape[:-1]) for name, g in gates.items()}
                    float_output = space.normalize
                    o, S = kernels.chunk(*xs, gates, S, cu_seqlens, factor, chunk_size, output_final_state, float_output)
                    return space.leave(o).to(v.dtype), space.state_out(S) if output_final_state else None
        return self.chunkwise(
            q, k, v, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
            cu_seqlens=cu_seqlens, chunk_size=chunk_size, **named,
        )  # fmt: skip

    def step(self, q_t, k_t, v_t, state, *, scale=None, inplace=False, backend=None, **named):
        states = state if isinstance(state, tuple) else (state,)
        asked = q_t, k_t, v_t, state, named, scale, inplace, backend
        kind = kind_of(q_t, k_t, v_t, *states, *named.values(), scale, inplace, backend)
        plan = self.plans.get(kind) or self._plan(kind, *asked)
        space, scale, sizes, served = plan
        gates = [x if x.dim() >= v_t.dim() - 1 else x.expand(v_t.shape[:-1]) for x in map(named.get, self.gates)]
        if served and kernels.may_step(backend, (q_t, k_t, v_t, *gates, *states)):
            q, k, feature_map = space.kernel_features(q_t, k_t)
            if kernels.may_step(backend, (q, k)):  # the map may have weights of its own
                return self._step_by_kernel(space, q, k, v_t, gates, state, states, scale, feature_map, inplace)
        S = space.state_in(state, sizes, ("q_t", q_t), name="state")
        enter = partial(self._enter, space, scale, sizes["HV"])
        with full_precision(q_t):
            o, S = self.update(*enter(*(x.to(S.dtype) for x in (q_t, k_t, v_t, *gates))), S)
            o, S = space.leave(o).to(v_t.dtype), space.state_out(S)
        return o, overwrite(state, S) if inplace else S

    def _plan_fused(self, kind, q, k, v, named, scale, output_final_state):
        """Check the arguments of `fused`: options, scale and sizes, kept by their `kind` for the next call."""
        space, sizes, _ = self.check(q, k, v, named)
        validate.flag("output_final_state", output_final_state)
        return self._keep(kind, (space, space.scale(scale, sizes["K"]), sizes))

    def _keep(self, kind, plan):
        if kind is not None:
            if len(self.plans) > 1000:
                self.plans.clear()
            self.plans[kind] = plan
        return plan

    def _plan(self, kind, q, k, v, state, named, scale, inplace, backend):
        """Check the arguments of `step`: options, scale, sizes, and whether the kernel serves such tensors.

        A token is little work and its arguments are alike from token to token, so the answer is kept by their `kind`.
        """
        wanted = kernels.wanted(backend, q)
        space, sizes, _ = self.check(q, k, v, named, T="")
        validate.flag("inplace", inplace)
        if state is None:
            raise TypeError("`state`: got nothing (None), expected the state that a form returned, or zeros")
        sizes.bind("N", sizes["B"], "`q_t`")
        scale = space.scale(scale, sizes["K"])
        states = space.checked(state, sizes, ("q_t", q), "state")
        return self._keep(kind, (space, scale, sizes, wanted and kernels.serve(backend, q, *states[0].shape[-2:])))

    def _step_by_kernel(self, space, q, k, v, gates, state, states, scale, feature_map, inplace):
        gates = dict(zip(self.gates, gates))
        o, new = kernels.decode(q, k, v, gates, states, float(scale), space.eps, feature_map, inplace)
        if all(x is y for x, y in zip(new, states)):
            return o, state
        S = tuple(new) if space.normalize else new[0]
        return o, overwrite(state, S) if inplace else S

    def _run(self, method, segment, q, k, v, named, scale, initial_state, output_final_state, cu_seqlens):
        space, sizes, gates = self.check(q, k, v, named)
        validate.flag("output_final_state", output_final_state)
        bounds = None if cu_seqlens is None else validate.sequence_bounds(cu_seqlens, sizes, q.device)
        sizes.bind("N", *((sizes["B"], "`q`") if bounds is None else (len(bounds) - 1, "`cu_seqlens`")))
        S = space.state_in(initial_state, sizes, ("q", q))
        enter = partial(self._enter, space, space.scale(scale, sizes["K"]), sizes["HV"])
        run = partial(by_segment, method, enter, space.leave, segment)
        with full_precision(q):
            o, S = run((q, k, v, *gates), S) if bounds is None else by_sequence(run, bounds, (q, k, v, *gates), S)
        return o, space.state_out(S) if output_final_state else None

    def check(self, q, k, v, named, T="T "):
        """Check the tensors, with or without the T axis; return options, sizes and one value of each gate a token."""
        space = self.space(**{name: x for name, x in named.items() if name not in self.gates})
        sizes, mark, gates = Sizes(), "" if T else "_t", []
        validate.floating_tensor(f"q{mark}", q, f"B {T}H K", sizes)
        like = (f"q{mark}", q)
        validate.floating_tensor(f"k{mark}", k, f"B {T}H K", sizes, like=like, share_dtype=True)
        validate.floating_tensor(f"v{mark}", v, f"B {T}HV V", sizes, like=like, share_dtype=True)
        validate.head_ratio("HV", "H", sizes, f"v{mark}")
        for name, axes in self.gates.items():
            each, _, constant = axes.replace("T ", T).partition(" or ")
            gate = named[name]
            one_a_head = constant and isinstance(gate, torch.Tensor) and gate.dim() == 1
            validate.floating_tensor(name, gate, constant if one_a_head else each, sizes, like=like)
            gates.append(gate.expand(v.shape[:-1]) if one_a_head else gate)
        return space, sizes, gates

    @staticmethod
    def _enter(space, scale, HV, q, k, v, *gates):
        q, k, v = space.enter(q, k, v, scale)
        return *share_heads(q, k, HV), v, *gates

    def forms(self, module):
        """The public functions `recurrent, parallel, chunkwise, fused, step` of the variant in the module `module`."""
        return tuple(self._publish(name, module) for name in ("recurrent", "parallel", "chunkwise", "fused", "step"))

    def _publish(self, name, module):
        """A form as a function whose signature names the gates and the options."""
        method = getattr(self, name)
        *own, _ = inspect.signature(method).parameters.values()
        tensors = [p for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
        gates = [inspect.Parameter(gate, inspect.Parameter.KEYWORD_ONLY) for gate in self.gates]
        options = list(inspect.signature(self.space).parameters.values())
        signature = inspect.Signature([*tensors, *gates, *options, *own[len(tensors) :]])
        bind = validate.binder(f"{module.rpartition('.')[2]}.{name}", signature)

        def form(*args, **kwargs):
            return method(**bind(args, kwargs))

        form.__name__ = form.__qualname__ = name
        form.__module__, form.__signature__ = module, signature
        form.__doc__ = document(name, self, signature)
        return form
