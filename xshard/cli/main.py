"""The console script `xshard`: says what to install where the command line's packages are missing.

The commands are in `xshard.cli`, which needs typer and rich; nothing else of xshard does.
"""

from __future__ import annotations

import sys

_NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command line; exit status 2 where the `cli` extra is not installed."""
    try:
        from xshard.cli.app import app
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in _NEEDED:
            raise
        print(f"xshard: the command line needs {package}: pip install 'xshard[cli]'", file=sys.stderr)
        sys.exit(2)
    app(prog_name="xshard")


if __name__ == "__main__":
    main()
