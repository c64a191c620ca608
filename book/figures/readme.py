"""The README's picture: one head of linear attention, computed in its three forms.

    python book/figures/readme.py

Queries, keys and values are those of the small trained model on a line of Pride and Prejudice.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch

from linattn_edu import data, linear, models, viz
from linattn_edu.feature_maps import elu1

TEXT, LAYER, HEAD, C = "It is a truth universally", 2, 0, 5
TARGET = Path(__file__).resolve().parents[1] / "_static" / "three_forms.png"

with torch.no_grad():
    q, k, v = (x.double() for x in models.pretrained().qkv(data.encode(TEXT)[None])[LAYER])
o, (S, z) = linear.recurrent(q, k, v, output_final_state=True)
torch.testing.assert_close(linear.parallel(q, k, v)[0], o)
torch.testing.assert_close(linear.chunkwise(q, k, v, chunk_size=C)[0], o)

scores = (elu1(q[0, :, HEAD]) @ elu1(k[0, :, HEAD]).T).tril()
weights = scores / scores.sum(-1, keepdim=True)
T = len(TEXT)

viz.use_style()
figure = plt.figure(figsize=(11, 4.1), dpi=130)
left, middle, right = figure.subfigures(1, 3, width_ratios=[1, 1, 1])

ax = left.subplots()
viz.attention_map(ax, weights, list(TEXT), causal=True, vmax=weights[8:].max(), colorbar=False)
left.suptitle("parallel: the whole T × T map")

ax = middle.subplots()
chunk = torch.arange(T) // C
inside = weights.where(chunk[:, None] == chunk, torch.zeros(()))
viz.attention_map(ax, inside, list(TEXT), causal=True, vmax=weights[8:].max(), colorbar=False)
for edge in range(C, T, C):
    ax.plot([-0.5, edge - 0.5], [edge - 0.5, edge - 0.5], color=viz.MUTED, linewidth=0.8)
    ax.plot([edge - 0.5, edge - 0.5], [edge - 0.5, min(edge + C, T) - 0.5], color=viz.MUTED, linewidth=0.8)
    ax.text(edge / 2 - 0.5, edge + (C - 1) / 2, f"state $S_{{{edge}}}$", color=viz.COLORS["state"], ha="center", va="center")
middle.suptitle(f"chunkwise: blocks of {C}, a state between")

ax = right.subplots()
viz.state_map(ax, S[0, HEAD], limit=S[0, HEAD].abs().quantile(0.98), colorbar=False)
right.suptitle(f"recurrent: one state, here $S_{{{T}}}$")

figure.savefig(TARGET, metadata={"Software": None})
