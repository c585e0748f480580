"""What layers of both bridges share: which elements an operation reads from sharded arrays."""
