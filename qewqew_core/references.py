"""Options whose value is elsewhere: ``{"env": NAME}`` or ``{"file": PATH}`` in its place, also as JSON, which is looked up where
the option is used. On a command line, a secret must be one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from qewqew_core.errors import BadArgument
from qewqew_core.secrecy import hide_from_now_on, reference_of, secrets_of


def refuse_in_clear(what: str, options: Mapping[str, Any], instead: str = "") -> None:
    """Raise `BadArgument`, which does not repeat it, if there is a secret in an option that will be on a command line."""
    for name, value in options.items():
        if any(secrets_of(name, value)):
            advice = instead or 'write {"env": "NAME"} or {"file": "PATH"} for it, and the job reads it from there'
            raise BadArgument(
                f"{what}: {name!r} has a password or another secret in clear text, and every user can read a command line; "
                + advice
            )


def is_reference(value: object) -> bool:
    """Does the option say where its value is?"""
    return reference_of(value) is not None


def resolved(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the values that they refer to; raises `BadArgument`, which shows no value."""
    found = {}
    for name, value in options.items():
        if reference := reference_of(value):
            value = _value(name, *reference)
            hide_from_now_on(name, value)
        elif isinstance(value, Mapping):
            value = resolved(value)
        elif isinstance(value, (list, tuple)):
            value = [resolved({name: each})[name] for each in value]
        found[name] = value
    return found


def _value(name: str, kind: str, where: str) -> str:
    try:
        if kind == "env":
            return os.environ[where]
        with open(where, encoding="utf-8") as file:
            return file.read().rstrip("\r\n")
    except KeyError as error:
        raise BadArgument(f"the option {name!r} refers to the environment variable {where!r}, which is not set") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise BadArgument(f"the option {name!r} refers to the file {where!r}, which cannot be read: {reason}") from error
