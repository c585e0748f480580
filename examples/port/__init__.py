"""The parts of port_check.py: one transformer block, its shardings, in torch, in JAX, and with bugs."""
