"""The planner beside four published ones."""
