"""The app: which commands there are, and how an error of xshard ends one."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from xshard.cli.bench import bench
from xshard.cli.calibrate import calibrate_command
from xshard.cli.console import print_error
from xshard.cli.plan import plan_command
from xshard.cli.show import show
from xshard.cli.verify import verify
from xshard.errors import XshardError


class _Commands(TyperGroup):
    """Prints errors of xshard as their message and exits with 2; others are bugs and keep a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except XshardError as error:
            print_error(error)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    help="Write a sharding down, plan the way to another, see it run on numpy, torch and JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for name, command in (
    ("plan", plan_command),
    ("show", show),
    ("verify", verify),
    ("bench", bench),
    ("calibrate", calibrate_command),
):
    app.command(name)(command)
