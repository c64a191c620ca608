"""The docstrings of the derived forms: what they share is written once, the rule comes from the variant's formulas."""

import inspect

SENTENCE = {
    "recurrent": "One token after another: the definition.",
    "parallel": "All tokens as one block, the T x T form: time and memory grow with T^2.",
    "chunkwise": "Block by block, `chunk_size` tokens at a time, in time linear in T: the training form.",
    "fused": "Triton kernels where Triton and the device serve; anywhere else this is `chunkwise`.",
    "step": "One token, for decoding, in one kernel where it serves; all tensors lack the T axis.",
}

GATE = {
    "g": "natural-log decay, finite and at most 0; alpha = exp(g)",
    "beta": "write strength, already squashed: in (0, 1), or (0, 2) for negative eigenvalues",
}


def document(name, operator, signature):
    """The docstring of the form `name`: sentence, rule, shapes, errors."""
    mark, T = ("_t", "") if name == "step" else ("", "T ")

    def axes(letters):
        return " or ".join(f"[{', '.join(part.split())}]" for part in letters.replace("T ", T).split(" or "))

    rule = [operator.update, *([operator.intra] if name in ("parallel", "chunkwise", "fused") else [])]
    state = operator.space.STATE
    arguments = [
        f"q{mark}, k{mark}: {axes('B T H K')}; q, k and v share one floating dtype.",
        f"v{mark}: {axes('B T HV V')}; value head i reads query/key head i // (HV // H).",
        *(f"{gate}: {axes(letters)}, {GATE[gate]}." for gate, letters in operator.gates.items()),
        *operator.space.ABOUT.splitlines(),
    ]
    if name == "step":
        arguments += [f"state: {state.replace('N', 'B')}.", "inplace: overwrite `state` and return it."]
        returns = f"o_t {axes('B T HV V')} in the dtype of v_t, and the new state."
    else:
        arguments += [
            f"initial_state: {state}; zero if None.",
            "output_final_state: return the last state, else None in its place.",
            "cu_seqlens: integers [N+1], the bounds of N sequences packed into one row (B = 1).",
        ]
        returns = f"o {axes('B T HV V')} in the dtype of v, and the last state or None."
    if "chunk_size" in signature.parameters:
        arguments.append("chunk_size: tokens a block" + ("; for the kernels a hint." if name == "fused" else "."))
    if "backend" in signature.parameters:
        other = "PyTorch" if name == "step" else "`chunkwise`"
        limit = "keep no graph for gradients" if name == "step" else "have first derivatives alone"
        arguments.append(f"backend: 'triton' insists on the kernels, which {limit}, 'torch' on {other};")
        arguments.append("    None takes what serves here.")
    parts = [
        [SENTENCE[name]],
        *([inspect.cleandoc(f.__doc__)] for f in rule),
        ["Args:", *(f"    {line}" for line in arguments)],
        ["Returns:", f"    {returns}"],
        [
            "Raises:",
            "    ValueError: a wrong shape, dtype, device, head ratio or value.",
            "    TypeError: an argument that is missing, or is no tensor or number.",
        ],
        [f"Source: {operator.source}"],
    ]
    return "\n\n".join("\n".join(part) for part in parts)
