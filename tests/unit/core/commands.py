"""The command line, called in this process."""

from __future__ import annotations

from functools import cache

import typer.testing
from typer.testing import CliRunner, Result

from qewqew_core.cli.main import app

typer.testing._get_command = cache(typer.testing._get_command)  # else each call would make all commands anew


def run(*arguments: object, stdin: bytes = b"") -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, prog_name="qewqew")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.stderr
    return result


def done(*arguments: object, stdin: bytes = b"") -> bytes:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return result.stdout_bytes


def refused(code: int, *arguments: object, match: str, stdin: bytes = b"") -> Result:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == code, (result.stdout, result.stderr)
    assert match in result.stderr
    return result
