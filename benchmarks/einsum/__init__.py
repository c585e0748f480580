"""Planned contractions beside XLA's own partitioner and DTensor."""
