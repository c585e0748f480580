"""What `benchmarks/planner.py` measures: the planner beside four published ones."""
