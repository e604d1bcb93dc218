"""Checks of what callers pass: each returns the value as it is used, or raises an error that says what is allowed."""

from __future__ import annotations

import grp
import os
import pwd
import sys
import threading
import time
from typing import TYPE_CHECKING

from qewqew_core.errors import BadArgument, BadKey, BadPath
from qewqew_core.secrecy import excerpt

if TYPE_CHECKING:
    import pendulum

_NO_GROUP = (1 << 32) - 1  # the system's word for none


def check_key(key: object) -> str:
    """The key, or `BadKey`: it appears in manifests, logs and messages, and callers make paths of it."""
    if not isinstance(key, str):
        raise BadKey(f"a key is a str, not {type(key).__name__}")
    if not key.strip():
        raise BadKey("a key must not be empty: a retry finds its commit or batch by it")
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise BadKey(f"the key {excerpt(key, 100)} is not valid text: {error.reason}") from error
    if size > 512 or not key.isprintable() or set(key) & set("/\\") or key in (".", ".."):
        raise BadKey(f"the key {excerpt(key, 100)} cannot be used: at most 512 bytes, no control characters, no slashes")
    return key


def check_path_text(owner: str, path: object) -> str:
    """The path of a queue or topic (``owner``) as text, or `BadPath`."""
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
        os.fsencode(text)
    except (TypeError, UnicodeEncodeError) as error:
        raise BadPath(f"a {owner}'s path is a str or a Path, not {excerpt(path, 100)}") from error
    if not isinstance(text, str) or not text or "\0" in text:
        raise BadPath(f"a {owner}'s path is a non-empty str without NUL, not {excerpt(text, 100)}")
    return text


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """An argument that must be one of a few words, or `BadArgument`."""
    if value not in choices:
        words = " or ".join(f'"{choice}"' for choice in choices)
        raise BadArgument(f"{name} must be {words}, not {excerpt(value, 60)}")
    return str(value)


def check_group(group: object) -> int:
    """The number of a Unix group, by its name or number, or `BadArgument`: there is none, or this user is not in it."""
    if not isinstance(group, str) or not group:
        raise BadArgument(f"group must be the name or number of a Unix group, as text, or None, not {excerpt(group, 60)}")
    try:
        number = int(group) if group.isascii() and group.isdecimal() else grp.getgrnam(group).gr_gid
        if number >= _NO_GROUP:
            raise KeyError(group)
    except (KeyError, ValueError):
        raise BadArgument(
            f"there is no group {excerpt(group, 60)} on this machine (getent group); make it, or correct the name"
        ) from None
    if os.geteuid() and number not in (os.getegid(), *os.getgroups()):
        raise BadArgument(
            f"user {user_name(os.geteuid())} is not in the group {group_name(number)}, as this process sees it: add the user "
            "(gpasswd -a USER GROUP), and start the process again after a new login. Nothing was changed"
        )
    return number


def is_outsider(user: int, group: int) -> bool:
    """Whether this machine knows that the user is not in the group. Root may do everything anyway."""
    try:
        known, members = pwd.getpwuid(user), grp.getgrgid(group).gr_mem
    except KeyError:  # a container, for example, need not have them
        return False
    return user not in (0, os.geteuid()) and known.pw_gid != group and known.pw_name not in members


def user_name(user: int) -> str:
    """A user as people know them."""
    try:
        return f"{pwd.getpwuid(user).pw_name} ({user})"
    except KeyError:
        return str(user)


def group_name(group: int) -> str:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)


def check_timeout(name: str, value: object) -> float:
    """A number of seconds that a thread can wait, or `BadArgument`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < threading.TIMEOUT_MAX:
        raise BadArgument(f"{name} must be a number of seconds, 0 or more, not {excerpt(value, 60)}")
    return float(value)


def lease_time(seconds: float | None) -> int | None:
    """For how long a lease is, in milliseconds, given seconds; None: until it ends. Raises `BadArgument`."""
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < 1e10:
        raise BadArgument(f"lease_timeout must be a number of seconds above 0, or None, not {excerpt(seconds, 60)}")
    return max(1, int(seconds * 1000))


def deadline(timeout: float | None) -> float | None:
    """Until when to wait, by the monotonic clock; None: forever. Raises `BadArgument`."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout != timeout:  # NaN
        raise BadArgument(f"timeout must be a number of seconds, or None to wait forever, not {excerpt(timeout, 60)}")
    return None if timeout > threading.TIMEOUT_MAX / 2 else time.monotonic() + timeout


def check_whole(name: str, value: object, low: int, high: int) -> int:
    """An argument that must be a whole number in a range, or `BadArgument`."""
    if type(value) is not int or not low <= value <= high:
        raise BadArgument(f"{name} must be a whole number from {low:,} to {high:,}, not {excerpt(value, 60)}")
    return value


def check_bound(name: str, value: int | None) -> int | None:
    """An upper limit, or None for no limit."""
    return None if value is None else check_whole(name, value, 1, sys.maxsize)


def moment(milliseconds: int) -> pendulum.DateTime:
    """A time of the log, as an aware datetime in UTC."""
    import pendulum  # late: Spark executors import this package to read batches, and need not have it

    # Messages of topics may have any time of 64 bits; years have four digits.
    return pendulum.from_timestamp(min(max(milliseconds, -62_135_596_800_000), 253_402_300_799_999) / 1000)
