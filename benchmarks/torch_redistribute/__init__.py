"""What `benchmarks/torch_bridge.py` is made of."""
