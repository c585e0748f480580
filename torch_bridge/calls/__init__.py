"""One call of a verb as a value: what it plans, caches, compares and records."""
