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
