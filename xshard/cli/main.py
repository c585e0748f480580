"""The console script `xshard`, also `python -m xshard`: it names a package that is missing."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; exit with 2 if the `cli` extra is not installed."""
    try:
        from xshard.cli.app import app  # inside: needs the optional packages
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(
            f"xshard: the command line needs {package}: pip install 'xshard[cli]'", file=sys.stderr
        )
        sys.exit(2)
    app(prog_name="xshard")
