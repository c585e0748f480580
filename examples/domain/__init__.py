"""The parts of domain_parallel.py: photographs, the network in torch and in JAX, and their runs."""
