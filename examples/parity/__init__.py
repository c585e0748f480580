"""The parts of train_parity.py: data, shardings, the model in torch and in JAX, and their runs."""
