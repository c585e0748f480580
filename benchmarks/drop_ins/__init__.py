"""The parts of `benchmarks/compat.py`."""
