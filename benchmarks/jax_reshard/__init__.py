"""The parts of `benchmarks/jax_bridge.py`."""
