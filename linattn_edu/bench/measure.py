"""How long a function runs and how much memory it takes, on a CPU or a GPU.

Time is the median of repeated calls, after warm-up, with the quartiles beside it. Memory is what the allocator handed
out at the peak, above what was held before the call: counted, not sampled, so that it repeats to the byte. On a GPU
`seconds` is the time from the first to the last launch with all that the host does meanwhile, `replay_seconds` that of
the launches.
"""

import os
import statistics
import time
from dataclasses import dataclass

import torch

# Below 6 the profiler writes two lines to stderr at each use; it reads this at its first.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


@dataclass(frozen=True)
class Times:
    """Seconds a call: the median, and the quartiles below and above it."""

    median: float
    low: float
    high: float
    calls: int


def seconds(f, *, device=None, at_least=5, budget=0.5, warmup=1):
    """Time `f()`: at least `at_least` calls, then as many as fit in `budget` seconds."""
    clock = _gpu_call if _is_gpu(device) else _cpu_call
    for _ in range(warmup):
        clock(f)
    times, spent = [], 0.0
    while len(times) < at_least or spent < budget:
        times.append(clock(f))
        spent += times[-1]
    low, median, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return Times(median, low, high, len(times))


def replay_seconds(f, **options):
    """Time the launches of `f()` alone: recorded once as a CUDA graph and replayed, so that no work of the host counts."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            f()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        f()
    return seconds(graph.replay, device="cuda", **options)


def peak_bytes(f, *, device=None):
    """Bytes that `f()` has allocated at its peak, results included, above what was allocated before the call."""
    if _is_gpu(device):
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        f()
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = f()  # held, so that its memory is not counted as freed
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    del result
    return peak


def _is_gpu(device):
    return device is not None and torch.device(device).type == "cuda"


def _cpu_call(f):
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def _gpu_call(f):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    f()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
