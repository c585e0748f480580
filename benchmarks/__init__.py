"""Benchmarks, a package each: `python -m benchmarks.NAME` from the root of the repository."""
