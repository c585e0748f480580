"""Einsums of blocks: the public verb, its plan as an executable, and the local products."""
