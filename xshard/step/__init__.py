"""Whole training steps: operations with named dims, and where everything in them lives."""
