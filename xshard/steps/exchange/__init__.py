"""Exchange, the general step: who sends which rows to whom, and how much over which links."""
