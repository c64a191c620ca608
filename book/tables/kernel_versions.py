"""What each version of a kernel was expected to take, took, and why: the engineers' log as tables."""

from linattn_edu.bench.record import recorded


def part(name):
    """The versions of one part, or of several whose names begin alike."""
    rows, _ = recorded("kernel_versions")
    table = [["Change", "Predicted, µs", "Forward, µs", "Backward, µs", "Why"]]
    for row in rows:
        if row["part"].startswith(name):
            figures = [f"{row[x]:g}" if row[x] != "" else "–" for x in ("forward_us", "backward_us")]
            label = row["change"] if row["part"] == name else f"{row['part'].removeprefix(name).strip(', ')}: {row['change']}"
            table.append([label, str(row["predicted"]).replace(" | ", "; backward "), *figures, row["reason"]])
    return table


def host():
    return part("host")


def walk():
    return part("walk")


def scores():
    return part("scores, channel gate")


def step():
    return part("step")


def scan():
    return part("selective scan")


def scan_beside_pytorch():
    """Mamba's scan as one kernel a pass and as chunks in plain PyTorch: device time and peak memory."""
    rows, _ = recorded("mamba_h200")
    cells = {}
    for row in rows:
        cells.setdefault((f"{row['B']} × {row['T']:,}", row["pass"]), {})[row["form"]] = row
    table = [["Sequences", "Pass", "Kernel, ms", "PyTorch, ms", "Kernel, MiB", "PyTorch, MiB"]]
    for cell, forms in cells.items():
        both = forms["fused"], forms["chunkwise"]
        table.append([*cell, *(f"{x['device_ms']:.2f}" for x in both), *(f"{x['peak_MiB']:,.0f}" for x in both)])
    return table
