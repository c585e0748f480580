"""Training steps of torch modules, recorded without data."""
