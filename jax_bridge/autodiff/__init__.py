"""Plans and products as operations that JAX can differentiate."""
