"""What is a secret in an option, a URL or a text: this decides for command lines, errors, plans, reasons and logs alike.

Only the forms here are recognised: names, URLs, NAME=VALUE, and a few of JSON, YAML, SQL and command lines. What `references`
read is hidden whatever its form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.parse import quote, quote_plus, unquote

# Parts of names, in small letters and without signs. What ends in one of `_ABOUT` tells where a secret is, or its kind or size.
_ABOUT = (
    "s?(?:character|expir(?:y|es(?:at|in)?)|file|path|location|encoding|provider|class|type|ur[il]|endpoint|id|name|mechanism"
    "|length|count|limit|size|bit|ttl|binding|env(?:var)?|header|(?<=in)(?:ms|seconds?))+s?$"
)
_NAME = re.compile(
    "(?:(?>passw(?:or[dt])?|passphrase|passcode|passkey|(?<!driver)(?<!executor)secret(?!ary)|(?<!max)token(?!iz)|jwt|credential|jaas"
    "|authorization|connectionstring|signature|azuresas|serviceaccountjson(?!keyfile$)|keyfilecontent|pvtkey"
    "|(?:private|access|account|api|shared|storage|master|encryption|signing|service|hmac|license|cipher)key)"
    f"(?!{_ABOUT})|(?:(?<!com)(?<!by)pass|pwd|auth|sas|sig|bearer|dsn|otp|cookies?|webhook(?:ur[il])?)$|^fskey$)"
)
_PIN = re.compile("(?:^|[^A-Za-z])(?i:pin)$|[a-z]Pin$")  # not in `shopping` or `ping`
_MANY = re.compile("(?:password|secret|token|cookie|key)s$")  # a number under such a name is how many there are
# Not even then: references to Kubernetes' and Vault's secrets, and settings of a column with such a name
_NO_NAME = re.compile("^sparkkubernetes(?:driver|executor)secret|pullsecrets?$|injectsecret|column")
_SCHEMA = re.compile("(?i)schemas?$")  # names fields, which may have any name

_PEM = r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?P<pem>(?:[\w+/=\s:,\\]|-(?!----))*)"
_HOOK = r"(?i:hooks\.slack\.com/\w{1,20}|webhook\.office\.com/\w{1,20}|discord(?:app)?\.com/api/webhooks)/(?P<hook>[^\s\"'<>]+)"
# Before the host of a URL; with one slash, it was taken for a path. For HTTP and git, a user without a password is a token.
_TOKEN = (
    r"\b(?i:https?|git):/{1,2}(?![^/?#\s:]*:(?!(?:x-oauth-basic)?@)[^/?#\s]*@)"  # noqa: S105  (a pattern)
    r"(?P<token>[^/?#\s:]+)(?::(?:x-oauth-basic)?)?@"
)
_URL = r"(?:(?<!/)//|:\\/\\/|\b(?!file:)[A-Za-z][A-Za-z0-9+.-]{1,30}:/(?!/))[^/\s:]*:(?P<url>[^/?#;\s]*)@"
_ORACLE = r"jdbc:oracle:\w+:[^/@\s:]{1,128}/(?P<oracle>\"[^\"]{0,128}\"|[^\s@]{0,128})@"
_BEARER = r"(?i:\bauthorization\W{1,9}(?:bearer|basic|token)|\bbearer)\s{1,9}(?P<bearer>[\w.~+/=-]{8,})"
_DIGEST = r"\b(?i:authorization\W{1,9}digest)\s[^\n]{0,400}?\b(?i:response)=[\"']?(?P<digest>[^\s\"',]+)"
_COOKIE = r"(?i:\bcookie:)\s{0,9}(?P<cookie>[^\s\"';]+(?:;\s{0,2}[^\s\"';=]+=[^\s\"';]+)*)"
_LOGIN = (
    r"(?<![\w-])(?:-u|--user|--proxy-user)(?:[\s=]{1,9}[\"']?|[\"'],\s{0,9}[\"'])"
    r"(?!\d+:\d+\b)[^\s:\"']{1,128}:(?!//)(?P<login>[^\s\"']+)"
)
# And then `_VALUE`, if the name says so:
_NAMED = r"(?<![\w.%/-])(?P<name>(?>[\w.%-]+))\s{0,9}=>?\s{0,9}"
_IS = r"\\?[\"']\s{0,9}:\s{0,9}\\?"
_BEGINS = r"(?=[\"'\d\[(]|[bBfFrRuU]{1,2}[\"']|[A-Za-z]\w{0,40}\()"
_QUOTED = rf"[\"'](?P<quoted>[\w.-]{{1,128}}){_IS}{_BEGINS}"
_TEXT = r"(?:\"[^\"]{0,128}\"|'[^']{0,128}'|[\w.]{1,20})"
_PAIR = rf"\\?[\"'][\w.-]{{1,64}}{_IS}{_TEXT}\s{{0,9}},\s{{0,9}}"
_ENTRY = (
    rf"[\"'](?i:name|key){_IS}[\"'](?P<entry>[\w.-]{{1,128}})\\?[\"']\s{{0,9}},\s{{0,9}}"
    rf"(?:{_PAIR}){{0,3}}\\?[\"'](?i:value){_IS}{_BEGINS}"
)
_REVERSED = (
    rf"[\"'](?i:value){_IS}[\"'](?=(?P<before>[^\"'\\]{{1,400}})\\?[\"']\s{{0,9}},\s{{0,9}}(?:{_PAIR}){{0,3}}"
    rf"\\?[\"'](?i:name|key){_IS}[\"'](?P<called>[\w.-]{{1,128}}))"
)
_ARGUMENT = r"[\"']--?(?!(?:u|user|proxy-user)\b)(?P<argument>[\w.-]{1,128})[\"'],\s{0,9}(?=[\"'])"
_YAML = (
    r"(?:(?m:^)[ \t]{0,40}(?:-[ \t]{1,9})?[\"']?(?P<yaml>[\w.-]{1,128})[\"']?:"
    r"(?:[ \t]{1,9}|[ \t]{1,9}[|>][+-]?[ \t]{0,9}\n[ \t]{1,40}|[ \t]{0,9}\n[ \t]{1,40}(?=[^\s:]+[ \t]*(?m:$)))"
    r"|\{[ \t]{0,40}(?P<flow>[\w.-]{1,128}):[ \t]{1,9})(?=[^\s{\[|>&*!#])"
)
_LISTED = (
    r"(?m:^)[ \t]{0,40}(?:-[ \t]{1,9})?(?i:name|key):[ \t]{1,9}[\"']?(?P<listed>[\w.-]{1,128})[\"']?[ \t]{0,9}\n"
    r"[ \t]{0,40}(?i:value):[ \t]{1,9}(?=[^\s{\[|>&*!#])"
)
_SQL = r"\b(?i:identified\s{1,9}(?:with\s{1,9}\S{1,64}\s{1,9})?by\s{1,9}(?P<password>password\s{1,9})?|password\s{1,9}(?='))"
_VALUE = re.compile(  # also b'…', SecretStr('…'), ['…', '…'] and 'it''s'
    r"""(?:[bBfFrRuU]{1,2}(?=["'])|[A-Za-z]\w{0,40}(?=\())?"""
    r"""(?:"([^"\\]*(?:\\.[^"\\]*)*)|'([^'\\]*(?:(?:\\.|'')[^'\\]*)*)|\{([^}]*)|\[([^\]]*)|\(([^)]*)"""
    r"""|([^\s;&,()"'{=\[][^\s;&,()"'{]*))"""
)
_FORMS = (_PEM, _HOOK, _TOKEN, _URL, _ORACLE, _BEARER, _DIGEST, _COOKIE, _LOGIN, _NAMED, _ENTRY, _REVERSED, _QUOTED, _ARGUMENT)
_BEFORE = re.compile(r"([^\"'\\]+)")
_FILE = re.compile(r"(?:/|\./|~/)[\w./-]+\.[A-Za-z]{2,5}")  # of credentials
# Each form has one, most texts have none:
_SIGNS = ("@", "=", ":", "'-", '"-', "bearer", "password", "identified", "hook", "private key")
_BEFORE_VALUE = ("name", "quoted", "entry", "argument", "listed", "yaml", "flow")

# Values that hide nothing: also what a statement has for a parameter, and types of fields
_NOTHING = {
    *("", "true", "false", "yes", "no", "on", "off", "none", "null", "kerberos", "ldap", "ntlm", "basic", "bearer", "oauth2"),
    *("?", "%s", "$1", "$2", "$3", "%", "$", "string", "binary", "boolean", "byte", "short", "int", "integer", "bigint", "long"),
    *("float", "double", "date", "text", "timestamp"),
}
_IN_SQL = re.compile(r"\d{1,3}|:[A-Za-z_]\w*")  # where there is a space before the value: `token = 1`

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
            _read.update(_pattern(form, whole=True) for form in _forms(each.strip()))


def excerpt(value: object, most: int) -> str:
    """What somebody gave, as an error quotes it: its repr without secrets, which are hidden before it is cut at ``most``."""
    return (repr(hide(value)) if isinstance(value, str) else hide(repr(value)))[:most]


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
    """Of a whole word, before which there may be the escape of a line's end."""
    return rf"(?:(?<!\w)|(?<=\\[nrt])){re.escape(secret)}(?!\w)" if whole or len(secret) < 4 else re.escape(secret)


def _forms(value: str) -> set[str]:
    """A value, and as Python, JSON and URLs write it."""
    written = {repr(value)[1:-1], repr(value.encode())[2:-1], quote(value, safe=""), quote(value), quote_plus(value)}
    return {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], *written}


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _is_secret(name: str) -> bool:
    letters = _letters(name)
    return (_NAME.search(letters) is not None or _PIN.search(name) is not None) and _NO_NAME.search(letters) is None


def _is_nothing(name: str, value: str) -> bool:
    """Whether a value says nothing: no, a type, how many, a path of credentials, or the same field of something else."""
    return (
        value.lower() in _NOTHING
        or (len(value) < 10 and value.isdecimal() and _MANY.search(_letters(name)) is not None)
        or (name.lower().endswith("credentials") and _FILE.fullmatch(value) is not None)
        or (value.count(".") == 1 and _letters(value.partition(".")[2]) == _letters(name.rpartition(".")[2]))
    )


def _places(text: str) -> Iterator[tuple[int, int]]:
    """Where the secrets in a text are, in order. In linear time: an error may quote a megabyte of a record."""
    end, letters = 0, text.lower()
    if not any(sign in letters for sign in _SIGNS):
        return
    for found in _in_text().finditer(text):
        if found.start() < end:
            continue
        place: re.Match[str] | None = found
        if found.lastgroup in _BEFORE_VALUE:
            place = _value_of(unquote(found[found.lastgroup]), found)
        elif found.lastgroup in ("password", None):
            place = _VALUE.match(text, found.end())
        elif found.lastgroup == "called":
            place = _BEFORE.match(text, found.end()) if _is_secret(found["called"]) else None
        if place and place[place.lastindex or 0].lower() not in _NOTHING:
            start, end = place.span(place.lastindex or 0)
            yield start, end


@cache
def _in_text() -> re.Pattern[str]:
    """Late: it takes longer than all of the others, and many a process needs none."""
    return re.compile("|".join((*_FORMS, _LISTED, _YAML, _SQL)))


def _value_of(name: str, found: re.Match[str]) -> re.Match[str] | None:
    """The value after a name in a text, if it is a secret."""
    if found.string.startswith(("{{", "${", "$("), found.end()):  # what a template or a shell will give
        return None
    value = _VALUE.match(found.string, found.end()) if _is_secret(name) else None
    if value is None or _is_nothing(name, (said := value[value.lastindex or 0]).rstrip("}")):
        return None
    if reference_of(value[0] + "}"):
        return None
    return None if found.lastgroup == "name" and found[0][-1].isspace() and _IN_SQL.fullmatch(said) else value
