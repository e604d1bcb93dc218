"""What is a secret in an option, a URL or a text: this decides for command lines, errors, plans, reasons and logs alike.

In place of a value, an option may be ``{"env": NAME}`` or ``{"file": PATH}``, also as JSON,
which is looked up where the option is used.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from qewqew_core.errors import BadArgument

# Parts of names, in small letters and without signs. What ends in one of `_ABOUT` tells where a secret is, or its kind or size.
_ABOUT = (
    "s?(?:character|expiry|file|path|location|encoding|provider|class|type|ur[il]|endpoint|id|name|mechanism|length|count|limit"
    "|size|bit|ttl)+s?$"
)
_NAME = re.compile(
    "(?:(?>passw(?:or[dt])?|passphrase|passcode|passkey|(?<!driver)(?<!executor)secret|(?<!max)token(?!iz)|jwt|credential|jaas"
    "|authorization|connectionstring|signature|azuresas|serviceaccountjson|keyfilecontent|pvtkey"
    "|(?:private|access|account|api|shared|storage|master|encryption|signing|service|hmac|license|cipher)key)"
    f"(?!{_ABOUT})|(?:(?<!com)(?<!by)pass|pwd|auth|sas|sig|bearer|dsn)$|^fskey$)"
)
# Not even then: references to Kubernetes' and Vault's secrets, and settings of a column with such a name
_NO_NAME = re.compile("^sparkkubernetes(?:driver|executor)secret|injectsecret|column")
_URL = r"(?<!/)//[^/\s:]*:(?P<url>[^/?#;\s]*)@|jdbc:oracle:\w+:[^/@\s:]{1,128}/(?P<oracle>\"[^\"]{0,128}\"|[^\s@]{0,128})@"
_NAMED = r"(?<![\w.%/-])(?P<name>(?>[\w.%-]+))\s{0,9}=\s{0,9}"  # and then `_VALUE`
_VALUE = re.compile(r"""(?:"([^"]*)|'([^']*)|\{([^}]*)|([^\s;&,()"'{=][^\s;&,()"'{]*))""")
_BEARER = r"\b[Bb]earer\s{1,9}(?P<bearer>[\w.~+/=-]{8,})"
_PEM = r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?P<pem>[^-]*)"
_IN_TEXT = re.compile(f"{_PEM}|{_URL}|{_BEARER}|{_NAMED}")
_NOTHING = {"", "true", "false", "none", "kerberos", "ldap", "ntlm", "basic", "oauth2"}  # values that hide nothing
_read: set[str] = set()  # the secrets that `resolved` has read


def secrets_of(name: str, value: object) -> Iterator[str]:
    """The secrets in an option: its value if the name says so, or what in a value, a URL or JSON is one."""
    if str(value).lower() in _NOTHING or _reference(value):
        return
    if _is_secret(name):
        yield str(value)
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from secrets_of(key if _is_secret(key) else f"{name}.{key}", each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from secrets_of(name, each)
    elif isinstance(value, str):
        yield from (value[start:end] for start, end in _places(value))


def refuse_in_clear(what: str, options: Mapping[str, Any], instead: str = "") -> None:
    """Raise `BadArgument`, which does not repeat it, if there is a secret in an option that will be on a command line."""
    for name, value in options.items():
        if any(secrets_of(name, value)):
            advice = instead or 'write {"env": "NAME"} or {"file": "PATH"} for it, and the job reads it from there'
            raise BadArgument(
                f"{what}: {name!r} has a password or another secret in clear text, and every user can read a command line; "
                + advice
            )


def hide(text: str, options: Mapping[str, Any] | None = None) -> str:
    """The text without what is a secret in it: that of URLs and of NAME=VALUE, of these options, and what `resolved` has read."""
    ends = [0, *(at for place in _places(text) for at in place), len(text)]
    text = "…".join(text[start:end] for start, end in zip(ends[::2], ends[1::2], strict=True))
    known = _read.union(*(secrets_of(name, value) for name, value in (options or {}).items()))
    for each in sorted(known, key=len, reverse=True):
        text = text.replace(each, "…")
    return text


def is_reference(value: object) -> bool:
    """Does the option say where its value is?"""
    return _reference(value) is not None


def resolved(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the values that they refer to; raises `BadArgument`, which shows no value."""
    found = {}
    for name, value in options.items():
        if reference := _reference(value):
            value = _value(name, *reference)
            _read.update(secrets_of(name, value))
        elif isinstance(value, Mapping):
            value = resolved(value)
        found[name] = value
    return found


def _is_secret(name: str) -> bool:
    letters = re.sub("[^a-z0-9]", "", name.lower())
    return _NAME.search(letters) is not None and _NO_NAME.search(letters) is None


def _places(text: str) -> Iterator[tuple[int, int]]:
    """Where the secrets in a text are, in order. In linear time: an error may quote a megabyte of a record."""
    end = 0
    for found in _IN_TEXT.finditer(text):
        place: re.Match[str] | None = found if found.start() >= end else None
        if place and found["name"] is not None:
            place = _VALUE.match(text, found.end()) if _is_secret(unquote(found["name"])) else None
        if place and place[place.lastindex or 0].lower() not in _NOTHING:
            start, end = place.span(place.lastindex or 0)
            yield start, end


def _reference(value: object) -> tuple[str, str] | None:
    if isinstance(value, str) and re.match(r'\s*\{\s*"(env|file)"', value):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if not isinstance(value, Mapping) or len(value) != 1:
        return None
    ((kind, where),) = value.items()
    return (kind, where) if kind in ("env", "file") and isinstance(where, str) and where.strip() else None


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
