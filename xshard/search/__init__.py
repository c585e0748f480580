"""The search for the cheapest steps between two layouts. It knows nothing of plans."""
