"""Losses of JAX as steps of training, and suggestions where their arrays live."""
