"""Benchmarks: time, memory and error of every form, measured side by side."""
