"""Draw book/_static/cpu_growth.png: how the time of each chunkwise form grows with T, from book/data/cpu_forms.csv."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from linattn_edu import viz
from linattn_edu.bench import sweep

viz.use_style()
rows, about = sweep.recorded("cpu_forms")
series = {}
for row in rows:
    if row["pass"] == "forward, growth":
        series.setdefault(row["operator"].replace("_", " "), {})[row["T"]] = row["seconds"]
lengths = sorted(next(iter(series.values())))
figure, (ax, below) = plt.subplots(2, 1, figsize=(6.0, 7.0), height_ratios=[3, 2])
lines = {name: [times[T] for T in lengths] for name, times in series.items()}
viz.costs(ax, lengths, lines, ylabel="seconds, forward", slopes=(1,))
growth = {name: times[-1] / times[0] for name, times in lines.items()}
viz.bars(below, growth, xlabel="time at 64K over time at 1K (64 times the tokens)", form="{:.0f}")
path = Path(__file__).resolve().parents[1] / "_static" / "cpu_growth.png"
figure.savefig(path)
print(f"{path.name}: {about['machine']}, torch {about['torch']}, {about['date']}")
