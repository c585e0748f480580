"""What `benchmarks/halo.py` is made of."""
