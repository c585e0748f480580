"""The app: its commands, and the exit of a command that raises an error of xshard."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from xshard.cli.calibrate import calibrate_command
from xshard.cli.explore.command import explore
from xshard.cli.plan import plan_command, show
from xshard.cli.selfcheck import selfcheck
from xshard.cli.state import state
from xshard.cli.suggest import suggest_command
from xshard.errors import XshardError
from xshard.pictures.terminal import print_error
from xshard.state.files.header import FileError


class _Commands(TyperGroup):
    """Commands that print the message of an error of xshard or of a file, and exit with 2.

    Other errors are faults of the program, and keep their traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except XshardError as error:
            print_error(error)
        except OSError as error:
            if error.filename is None:  # a pipe that was closed
                raise
            print_error(FileError(f"{error.filename}: {error.strerror}"))
        raise typer.Exit(2)


app = typer.Typer(
    cls=_Commands,
    help="Write a sharding down, plan the way to another, see it run on numpy, torch and JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("plan")(plan_command)
for command in (show, explore, selfcheck):
    app.command(command.__name__)(command)
app.command("calibrate")(calibrate_command)
app.command("suggest")(suggest_command)
app.add_typer(state, name="state")
