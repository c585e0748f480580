"""Pictures of layouts and plans: one record of who holds what, drawn in a terminal, as SVG and as HTML."""
