"""What is a secret in an option, a URL or a text: this decides for command lines, errors, plans, reasons and logs alike.

Only the forms here are recognised: names, URLs, NAME=VALUE, and a few of JSON, YAML, SQL and command lines. What `references`
read is hidden whatever its form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

# Parts of names, in small letters and without signs. What ends in one of `_ABOUT` tells where a secret is, or its kind or size.
_ABOUT = (
    "s?(?:character|expiry|file|path|location|encoding|provider|class|type|ur[il]|endpoint|id|name|mechanism|length|count|limit"
    "|size|bit|ttl)+s?$"
)
_NAME = re.compile(
    "(?:(?>passw(?:or[dt])?|passphrase|passcode|passkey|(?<!driver)(?<!executor)secret|(?<!max)token(?!iz)|jwt|credential|jaas"
    "|authorization|connectionstring|signature|azuresas|serviceaccountjson|keyfilecontent|pvtkey"
    "|(?:private|access|account|api|shared|storage|master|encryption|signing|service|hmac|license|cipher)key)"
    f"(?!{_ABOUT})|(?:(?<!com)(?<!by)pass|pwd|auth|sas|sig|bearer|dsn|otp|cookies?|webhook(?:ur[il])?)$|^fskey$)"
)
_PIN = re.compile("(?:^|[^A-Za-z])(?i:pin)$|[a-z]Pin$")  # not in `shopping` or `ping`
_MANY = re.compile("(?:password|secret|token|cookie|key)s$")  # a number under such a name is how many there are
# Not even then: references to Kubernetes' and Vault's secrets, and settings of a column with such a name
_NO_NAME = re.compile("^sparkkubernetes(?:driver|executor)secret|injectsecret|column")
_SCHEMA = re.compile("(?i)schemas?$")  # names fields, which may have any name

_PEM = r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?P<pem>(?:[\w+/=\s:,\\]|-(?!----))*)"
_HOOK = r"(?i:hooks\.slack\.com/\w{1,20}|webhook\.office\.com/\w{1,20}|discord(?:app)?\.com/api/webhooks)/(?P<hook>[^\s\"'<>]+)"
# Before the host of a URL; with one slash, it was taken for a path. For HTTP and git, a user without a password is a token.
_TOKEN = r"\b(?i:https?|git):/{1,2}(?P<token>[^/?#\s:]+)(?::(?:x-oauth-basic)?)?@"  # noqa: S105  (a pattern)
_URL = r"(?:(?<!/)//|\b(?!file:)[A-Za-z][A-Za-z0-9+.-]{1,30}:/(?!/))[^/\s:]*:(?P<url>[^/?#;\s]*)@"
_ORACLE = r"jdbc:oracle:\w+:[^/@\s:]{1,128}/(?P<oracle>\"[^\"]{0,128}\"|[^\s@]{0,128})@"
_BEARER = r"(?i:\bauthorization\W{1,9}(?:bearer|basic|token)|\bbearer)\s{1,9}(?P<bearer>[\w.~+/=-]{8,})"
_COOKIE = r"(?i:\bcookie:)\s{0,9}(?P<cookie>[^\s\"';]+(?:;\s{0,2}[^\s\"';=]+=[^\s\"';]+)*)"
_LOGIN = r"(?<![\w-])(?:-u|--user|--proxy-user)[\s=]{1,9}[\"']?(?!\d+:\d+\b)[^\s:\"']{1,128}:(?!//)(?P<login>[^\s\"']+)"
# And then `_VALUE`, if the name says so:
_NAMED = r"(?<![\w.%/-])(?P<name>(?>[\w.%-]+))\s{0,9}=\s{0,9}"
_QUOTED = r"[\"'](?P<quoted>[\w.-]{1,128})\\?[\"']\s{0,9}:\s{0,9}\\?(?=[\"'\d])"
_ENTRY = (
    r"[\"'](?i:name|key)\\?[\"']\s{0,9}:\s{0,9}\\?[\"'](?P<entry>[\w.-]{1,128})\\?[\"']\s{0,9},\s{0,9}"
    r"\\?[\"'](?i:value)\\?[\"']\s{0,9}:\s{0,9}\\?(?=[\"'\d])"
)
_YAML = r"(?:(?m:^)|\{)[ \t]{0,40}(?:-[ \t]{1,9})?(?P<yaml>[\w.-]{1,128}):[ \t]{1,9}(?=[^\s{\[|>&*!#])"
_SQL = r"\b(?i:identified\s{1,9}(?:with\s{1,9}\S{1,64}\s{1,9})?by\s{1,9}(?P<password>password\s{1,9})?|password\s{1,9}(?='))"
_VALUE = re.compile(r"""(?:"([^"\\]*(?:\\.[^"\\]*)*)|'([^'\\]*(?:\\.[^'\\]*)*)|\{([^}]*)|([^\s;&,()"'{=][^\s;&,()"'{]*))""")
_IN_TEXT = re.compile(
    "|".join((_PEM, _HOOK, _TOKEN, _URL, _ORACLE, _BEARER, _COOKIE, _LOGIN, _NAMED, _ENTRY, _QUOTED, _YAML, _SQL))
)
_SIGNS = ("@", "=", ":", "bearer", "password", "identified", "hook", "private key")  # each form has one: most texts have none
_BEFORE_VALUE = ("name", "quoted", "entry", "yaml")

# Values that hide nothing: also what a statement has for a parameter, and types of fields
_NOTHING = {
    *("", "true", "false", "none", "null", "kerberos", "ldap", "ntlm", "basic", "bearer", "oauth2"),
    *("?", "%s", "$1", "$2", "$3"),
}
_IN_SQL = re.compile(r"\d{1,3}|:[A-Za-z_]\w*")  # where there is a space before the value: `token = 1`
_TYPES = {"string", "binary", "boolean", "byte", "short", "int", "integer", "bigint", "long", "float", "double", "date", "text"}

SHORTEST = 5  # characters of what a reference gave, if neither its name nor its form says that it is a secret
_read: set[str] = set()  # patterns of what references gave


def secrets_of(name: str, value: object) -> Iterator[str]:
    """The secrets in an option: its value if the name says so, or what in a value, a URL or JSON is one."""
    if _is_nothing(name, str(value)) or reference_of(value) or _SCHEMA.search(name):
        return
    if _is_secret(name) and not isinstance(value, (Mapping, list, tuple)):
        yield str(value)
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from secrets_of(key if _is_secret(key) else f"{name}.{key}", each)
            if key in ("name", "key") and isinstance(each, str) and _is_secret(each) and "value" in value:
                yield from secrets_of(each, value["value"])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from secrets_of(name, each)
    elif isinstance(value, str):
        yield from (value[start:end] for start, end in _places(value))


def hide(text: str, options: Mapping[str, Any] | None = None) -> str:
    """The text without what is a secret in it: by its form, of these options, and what references gave."""
    ends = [0, *(at for place in _places(text) for at in place), len(text)]
    text = "…".join(text[start:end] for start, end in zip(ends[::2], ends[1::2], strict=True))
    known = _read.union(*(map(_pattern, secrets_of(name, value)) for name, value in (options or {}).items()))
    return re.sub("|".join(sorted(known, key=len, reverse=True)), "…", text) if known else text


def hide_from_now_on(name: str, value: str) -> None:
    """Hide what a reference gave for this option. What is not a secret by name or form is hidden as a whole word."""
    _read.update(map(_pattern, secrets_of(name, value)))
    for each in (value, *value.splitlines()):
        if len(each.strip()) >= SHORTEST and not _is_nothing(name, each):
            _read.add(_pattern(each.strip(), whole=True))


def reference_of(value: object) -> tuple[str, str] | None:
    """The kind, "env" or "file", and the place of the value, if this says where it is: ``{"env": NAME}``, also as JSON."""
    if isinstance(value, str) and re.match(r'\s*\{\s*"(env|file)"', value):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if not isinstance(value, Mapping) or len(value) != 1:
        return None
    ((kind, where),) = value.items()
    return (kind, where) if kind in ("env", "file") and isinstance(where, str) and where.strip() else None


def _pattern(secret: str, whole: bool = False) -> str:
    return rf"(?<!\w){re.escape(secret)}(?!\w)" if whole or len(secret) < 4 else re.escape(secret)


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _is_secret(name: str) -> bool:
    letters = _letters(name)
    return (_NAME.search(letters) is not None or _PIN.search(name) is not None) and _NO_NAME.search(letters) is None


def _is_nothing(name: str, value: str) -> bool:
    return value.lower() in _NOTHING or (len(value) < 10 and value.isdecimal() and _MANY.search(_letters(name)) is not None)


def _places(text: str) -> Iterator[tuple[int, int]]:
    """Where the secrets in a text are, in order. In linear time: an error may quote a megabyte of a record."""
    end, letters = 0, text.lower()
    if not any(sign in letters for sign in _SIGNS):
        return
    for found in _IN_TEXT.finditer(text):
        if found.start() < end:
            continue
        place: re.Match[str] | None = found
        if found.lastgroup in _BEFORE_VALUE:
            place = _value_of(unquote(found[found.lastgroup]), found)
        elif found.lastgroup in ("password", None):
            place = _VALUE.match(text, found.end())
        if place and place[place.lastindex or 0].lower() not in _NOTHING:
            start, end = place.span(place.lastindex or 0)
            yield start, end


def _value_of(name: str, found: re.Match[str]) -> re.Match[str] | None:
    """The value after a name in a text, if it is a secret."""
    value = _VALUE.match(found.string, found.end()) if _is_secret(name) else None
    if value is None or _is_nothing(name, said := value[value.lastindex or 0]):
        return None
    if found.lastgroup == "name":
        return None if found[0][-1].isspace() and _IN_SQL.fullmatch(said) else value
    return None if said.lower().rstrip("}") in _TYPES else value
