"""The command line: one file per command. Needs the `cli` extra (typer, rich)."""
