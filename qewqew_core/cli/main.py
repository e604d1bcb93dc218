"""The command ``qewqew``: its families of commands are cli_*.py; see docs/cli.md."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from typing import Annotated

try:
    import typer  # noqa: I001 - it is what a person misses first
    import rich  # noqa: F401
except ModuleNotFoundError as missing:
    sys.exit(f"qewqew: the command line needs {missing.name}, which is not installed: pip install 'qewqew[cli]'")

from qewqew_core.cli import cli_batches, cli_damage, cli_drain, cli_files, cli_looking, cli_monitoring, cli_records, cli_topic
from qewqew_core.cli.targets import share_with
from qewqew_core.cli.terminal import EPILOG, Commands, print_line

app = typer.Typer(
    cls=Commands,
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _family in (cli_records, cli_looking, cli_monitoring, cli_batches, cli_drain, cli_damage, cli_files):
    app.add_typer(_family.app)
app.add_typer(cli_topic.app, name="topic", rich_help_panel="Topics")


def main() -> None:
    """The entry point of ``qewqew``."""
    # Python has None for a stream whose descriptor is closed.
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - open as long as the process is
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.exit("qewqew: standard output is closed")
    match sys.argv[1:]:
        case ["help", *command]:
            app([*command, "--help"], prog_name="qewqew")
        case ["version"]:
            app(["--version"], prog_name="qewqew")
        case arguments:
            app(arguments, prog_name="qewqew")


def _show_version(wanted: bool) -> None:
    if wanted:
        print_line(f"qewqew {importlib.metadata.version('qewqew')}")
        raise typer.Exit


@app.callback(help="Durable local queues and topics. PATH is a queue, such as data/orders.qew, or a topic, a directory.")
def options(
    group: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP",
            callback=share_with,
            help="The Unix group, by name or number, whose members share the queue or topic that a command opens.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
