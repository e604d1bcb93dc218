"""Checks of arguments that hooks, operators and sensors share. Each raises `BadArgument`, which names the argument."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from airflow.sdk import ObjectStoragePath, XComArg

from qewqew_core import BadArgument
from qewqew_core.batch.store import store_of
from qewqew_core.secrecy import excerpt

LARGEST = 2**63 - 1
LONGEST = timedelta(days=3650)


def is_rendered_later(value: Any) -> bool:
    """Is this a template, or another task's XCom, or has it one inside, whose value is known only when the task runs?"""
    if isinstance(value, str):
        return any(mark in value for mark in ("{{", "{%", "{#"))
    return _has_xcom(value)


def _has_xcom(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_xcom, value.values()))
    return isinstance(value, XComArg) or (isinstance(value, (list, tuple)) and any(map(_has_xcom, value)))


def read_arguments(owner: Any, checks: Mapping[str, Callable[[str, Any], Any]]) -> None:
    """Check the arguments that an operator keeps under these names, and keep what the checks return. Leaves out None, and what is
    not rendered yet.
    """
    for name, check in checks.items():
        value = getattr(owner, name)
        if value is not None and not is_rendered_later(value):
            setattr(owner, name, check(name, value))


def check_rendered(name: str, value: Any) -> None:
    """Raise `BadArgument` for a template or an XCom, which only an operator can render."""
    if is_rendered_later(value):
        raise BadArgument(f"{name} is {excerpt(value, 80)}: a trigger cannot render templates or get results of tasks")


def whole(name: str, value: Any, low: int = 1, high: int = LARGEST) -> int:
    """``value`` as an int from ``low`` to ``high``. Text is accepted, because templates and connections give text."""
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if type(number) is not int:
        raise BadArgument(f"{name} must be a whole number, not {excerpt(value, 80)}")
    if not low <= number <= high:
        raise BadArgument(f"{name} is {number:,}; it must be from {low:,} to {high:,}")
    return number


def choice(name: str, value: Any, *choices: Any) -> Any:
    """``value``, which must be one of these."""
    if not any(value == each and type(value) is type(each) for each in choices):
        raise BadArgument(f"{name} must be {' or '.join(map(repr, choices))}, not {excerpt(value, 80)}")
    return value


def seconds(name: str, value: Any, *, low: float = 0.0, high: timedelta = LONGEST) -> timedelta:
    """``value`` (a timedelta or seconds, also as text) as a timedelta from ``low`` seconds to ``high``."""
    if isinstance(value, timedelta):
        number: Any = value.total_seconds()
    else:
        try:
            number = float(value) if isinstance(value, str) else value
        except ValueError:
            number = None
    if type(number) not in (int, float) or not math.isfinite(number):
        raise BadArgument(f"{name} must be a timedelta or a number of seconds, not {excerpt(value, 80)}")
    if not low <= number <= high.total_seconds():
        raise BadArgument(f"{name} is {number:,} s; it must be from {low:g} s to {high.days:,} days")
    return timedelta(seconds=number)


def place(name: str, value: Any) -> Any:
    """``value`` (a directory, or the URL of a store) as text; a template or an XCom as it is."""
    if is_rendered_later(value):
        return value
    if getattr(value, "conn_id", None):
        raise BadArgument(
            f"{name}: {value} needs a connection of Airflow's, which is not used here; give its URL as text, and the credentials "
            "in the environment"
        )
    text = str(value) if isinstance(value, (os.PathLike, ObjectStoragePath)) else value
    if not isinstance(text, str) or not text:
        raise BadArgument(f"{name} must be a directory or a URL, not {excerpt(text, 80)}")
    store_of(text)
    return text


# Of what is leased.
LIMITS: dict[str, Callable[[str, Any], Any]] = {
    "max_records": whole,
    "max_bytes": whole,
    "lease_timeout": lambda name, value: seconds(name, value, low=1).total_seconds(),
}
