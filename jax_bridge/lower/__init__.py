"""How JAX executes each step of a plan, on one device's block."""
