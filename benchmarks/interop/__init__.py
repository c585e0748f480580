"""Arrays shared between torch and JAX, and JAX called from torch."""
