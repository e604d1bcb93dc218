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
    "s?(?:(?:refresh|renewal|rotation|hash|validation|min|max)(?!$)|character|expir(?:y|es(?:at|in)?)|file|path|location|encoding"
    "|provider|class|type|ur[il]|endpoint|id|name|mechanism|version|polic(?:y|ie)|algorithm|method|scheme|format|strategy|interval"
    "|timeout|lifetime|duration|issuer|audience|scope|arn|length|count|limit|size|bit|ttl|binding|env(?:var)?|header"
    "|(?<=in)(?:ms|seconds?))+s?$"
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
_HOOK = (
    r"(?i:hooks\.slack\.com/\w{1,20}|(?:webhook|\boutlook)\.office(?:365)?\.com/webhook\w{0,9}|webhook\.office\.com/\w{1,20}"
    r"|discord(?:app)?\.com/api/webhooks)/(?P<hook>[^\s\"'<>]+)"
)
# Before the host of a URL; with one slash, it was taken for a path. For HTTP and git, a user without a password is a token.
_TOKEN = (
    r"\b(?i:https?|git):/{1,2}(?![^/?#\s:]*:(?!(?:x-oauth-basic)?@)[^/?#\s]*@)"  # noqa: S105  (a pattern)
    r"(?P<token>[^/?#\s:]+)(?::(?:x-oauth-basic)?)?@"
)
_URL = r"(?:(?<!/)//|:\\/\\/|\b(?!file:)[A-Za-z][A-Za-z0-9+.-]{1,30}:/(?!/))[^/\s:]*:(?P<url>[^/?#;\s]*)@"
# A password with `/`, `?`, `#` or `;` as it is. What is a port, or stands for one, begins none.
_ODD_URL = (
    r"(?:(?<=\w:)//|(?<=\w):\\/\\/)[^/\s:@\[\];=?#\"'<>,(){}]*:(?!(?:\d{1,5}|(?i:port)|\$?\{[^}\s]{0,64}\}|\$\w{1,64}|<\w{1,64}>|%\w)"
    r"(?:[/?#,;\\]|$))(?P<odd>[^\s\"'<>]{1,256})@(?=[\w\[])"
)
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
    r"(?:(?m:^)[ \t]{0,40}(?:-[ \t]{1,9})?[\"']?(?P<yaml>[\w.-]{1,128})[\"']?:(?=\s)"
    r"|[{,][ \t]{0,40}(?P<flow>[\w.-]{1,128}):[ \t]{1,9}(?=[^\s{\[|>&*!#]))"
)
_LISTED = (
    r"(?m:^)[ \t]{0,40}(?:-[ \t]{1,9})?(?i:name|key):[ \t]{1,9}[\"']?(?P<listed>[\w.-]{1,128})[\"']?[ \t]{0,9}\n"
    r"[ \t]{0,40}(?i:value):(?=\s)"
)
_SQL = (
    r"\b(?i:identified\s{1,9}(?:with\s{1,9}\S{1,64}\s{1,9})?by\s{1,9}(?P<password>password\s{1,9})?"
    r"|(?:password|secret_(?:access_)?key|session_token)\s{1,9}(?=(?:[ENBX]|U&)?'|\$(?:[A-Z_]\w{0,60})?\$))"
)
# Values: b'…', E'…', SecretStr('…'), ['…', '…'], 'it''s', {a}}b}, $$it's$$; and where those without a quote end
_PREFIX = re.compile(r"""(?:[bBfFrRuUeEnNxX]{1,2}|[uU]&)(?=["'])""")
_OPEN = re.compile(r"""(?:[A-Za-z]\w{0,40}(?=\())?[\[(]|\{(?=\s{0,9}["'])""")
_ENCLOSED = re.compile(
    r"""(?s:"([^"\\]*(?:\\.[^"\\]*)*)|'([^'\\]*(?:(?:\\.|'')[^'\\]*)*)|\{((?:[^}]|\}\}(?=[^\s,;)}"']))*+)"""
    r"""|\$((?:[A-Za-z_]\w{0,60})?)\$((?:(?!\$\4\$).){1,400})\$\4\$)"""
)
_WORD = re.compile(r"""[^\s;&,()"'{=\[][^\s;&,()"'{]*""")
_ARGUMENT_WORD = re.compile(r"""[^\s;&,()"'{=\[](?:[^\s;&,()"'{]|[;&,()](?![\s"'-]|$|[\w.%-]{1,64}=))*""")
_IN_QUOTES = {quote: re.compile(rf"[^{quote}\\\n]+(?:\\.[^{quote}\\\n]*)*(?={quote})") for quote in "\"'"}
_IN_ESCAPED = re.compile(r"""[^"'\\\n]+(?=\\["'])""")
_IN_FLOW = re.compile(r"[^,}\s](?:[ \t]{0,9}[^,}\s])*")
_IN_LINE = re.compile(r"\S(?:(?!\s#|[,;]?[ \t]{1,9}[\w.-]{1,64}:\s|[ \t]{1,40}$)[^\r\n])*+", re.MULTILINE)
_PART = re.compile(  # of what is in brackets
    r"""(?s:(?<!\w)"(?:[^"\\]|\\.){0,1000}+"|(?:(?<!\w)|\b[A-Za-z])'(?:[^'\\]|\\.|''){0,1000}+'|\\.)|[\[({})\]]"""
)
# After a name of YAML: a value, or the next lines
_NEXT = re.compile(
    r"[ \t]{1,9}(?:(?:!!(?:str|binary)|&[\w-]{1,64})[ \t]{1,9})?(?=[^\s{|>&*!#])|[ \t]{0,9}([|>][+-]?\d?[ \t]{0,9})?\r?\n"
)
_LINE = re.compile(r"([ \t]*)(-[ \t]{1,9})?([^\r\n]*)\r?\n?")
_MAPPING = re.compile(r"[\"']?[\w.-]{1,128}[\"']?:(?:\s|$)|[{\[|>&*!#]")
_FORMS = (
    *(_PEM, _HOOK, _TOKEN, _URL, _ODD_URL, _ORACLE, _BEARER, _DIGEST, _COOKIE, _LOGIN, _NAMED, _ENTRY, _REVERSED, _QUOTED),
    *(_ARGUMENT, _LISTED, _YAML, _SQL),
)
_BEFORE = re.compile(r"([^\"'\\]+)")
_FILE = re.compile(r"(?:/|\./|~/)[\w./-]+\.[A-Za-z]{2,5}")  # of credentials
# Each form has one, most texts have none:
_SIGNS = ("@", "=", ":", "'-", '"-', "bearer", "password", "identified", "hook", "private key", "secret", "session_token")
_BEFORE_VALUE = ("name", "quoted", "entry", "argument", "listed", "yaml", "flow")

# Values that hide nothing: also what a statement has for a parameter, and types of fields
_NOTHING = {
    *("", "true", "false", "yes", "no", "on", "off", "none", "null", "kerberos", "ldap", "ntlm", "basic", "bearer", "oauth2"),
    *("?", "%s", "$1", "$2", "$3", "%", "$", "string", "binary", "boolean", "byte", "short", "int", "integer", "bigint", "long"),
    *("float", "double", "date", "text", "timestamp"),
}
_SAYS_WHAT = re.compile(  # a type, or where a key is: its ARN, its name at Google, an alias at AWS
    r"(?:Optional\[)?(?:str|bytes|varchar|char)(?:\(\d{1,9}\))?\]?(?: \| None)?(?: = None)?(?: not null)?"
    r"|arn:aws[\w-]*:[\w-]+:[\w-]*:\d*:[\w/:.+=@-]{1,200}|projects/[\w-]{1,64}/(?:locations|secrets)/[\w/-]{1,200}|alias/[\w/-]{1,200}",
    re.IGNORECASE,
)
_HIDDEN = re.compile(r"(?i:(?:bearer|basic|token|digest)\s{1,9})?…(?:\s|$)")  # before
_MECHANISM = re.compile(
    r"(?i)no-?sasl|sasl|plain|simple|gssapi|digest|cert(?:ificate)?|m?tls|ssl|iam|jwt|token|password|scram[\w-]*|none"
)
_COMPUTED = re.compile(r"([A-Za-z_](?:\w|\.(?!\.)){0,60})\(")  # by SQL or code, of a column
_COMPUTES = re.compile(
    "(?:lower|upper|l?r?trim|coalesce|nvl2?|ifnull|nullif|concat(?:_ws)?|md5|sha[125]?(?:256|512)?|crc32|xxhash64|hash|cast|try_cast"
    "|substr(?:ing)?|left|right|regexp_\\w+|replace|translate|encode|decode|(?:to_|from_|un)?(?:base64|hex)|uuid|col|max|min|count"
    "|first|last|any_value|get_json_object|json_\\w+|length|split|reverse|mask|digest)"
)
_OTHER_USERS = re.compile(  # Their -u is a user and a group, or a flag, if it is theirs and not that of a command which they run.
    r"(?:^|[\s/=;&|('\"])(?:(?:chown|chgrp|rsync|install|cp|tar|id|ps)(?=[\s'\"])[^\n;&|]*"
    r"|(?:docker|podman|nerdctl|sudo|su|runuser|setpriv|unshare|systemd-run)(?:[\s'\",]{1,9}(?:exec|run|create|compose|-[\w=-]+))*"
    r"[\s'\",]{1,9})$"
)
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
        or (name.lower().endswith("auth") and _MECHANISM.fullmatch(value) is not None)
        or _SAYS_WHAT.fullmatch(value) is not None
        or (value.count(".") == 1 and _letters(value.partition(".")[2]) == _letters(name.rpartition(".")[2]))
    )


def _places(text: str) -> Iterator[tuple[int, int]]:
    """Where the secrets in a text are, in order. In linear time: an error may quote a megabyte of a record."""
    end, letters = 0, text.lower()
    if not any(sign in letters for sign in _SIGNS):
        return
    for found in _in_text().finditer(text):
        if found.start() >= end:
            for start, end in _places_of(found):
                yield start, end


@cache
def _in_text() -> re.Pattern[str]:
    """Late: it takes longer than all of the others, and many a process needs none."""
    return re.compile("|".join(_FORMS))


def _places_of(found: re.Match[str]) -> Iterator[tuple[int, int]]:
    """Where the secrets are that this form tells of."""
    text, form = found.string, found.lastgroup
    if form in _BEFORE_VALUE:
        places = _after_name(unquote(found[form]), form, found)
    elif form in ("password", None):
        places = iter([_value(text, found.end())])
    elif form == "called":
        told = _BEFORE.match(text, found.end()) if _is_secret(found["called"]) else None
        places = iter([told.span() if told else (0, 0)])
    elif form == "login" and _OTHER_USERS.search(text, max(0, found.start() - 200), found.start()):
        return
    else:
        places = iter([found.span(form)])
    for start, end in places:
        if text[start:end].lower() not in _NOTHING:
            yield start, end


def _after_name(name: str, form: str, found: re.Match[str]) -> Iterator[tuple[int, int]]:
    """The values after a name in a text, if they are secrets."""
    text, at = found.string, found.end()
    if not _is_secret(name):
        return
    if in_yaml := form in ("yaml", "listed"):
        after = _NEXT.match(text, at)
        if after is None:
            return
        if after[0].endswith("\n"):
            yield from _next_lines(name, found, after)
            return
        at = after.end()
    if text.startswith(("{{", "${", "$("), at):  # what a template or a shell will give
        return
    start, end = _value(text, at, _bare(form, found) if not in_yaml or text[found.start(form) - 1] in "\"'" else _IN_LINE)
    said = text[start:end]
    if _is_nothing(name, said.rstrip("},;")) or reference_of(text[at:end] + "}") or (in_yaml and _HIDDEN.match(said)):
        return
    if form == "name" and ((found[0][-1].isspace() and _IN_SQL.fullmatch(said)) or _is_computed(name, text, at)):
        return
    if all(_is_nothing(name, each.strip(" \"'")) for each in said.split(",")):
        return
    yield start, end


def _next_lines(name: str, found: re.Match[str], after: re.Match[str]) -> Iterator[tuple[int, int]]:
    """The values in the lines below a name of YAML: a block, a list, or what is longer than a line."""
    text, at, first = found.string, after.end(), True
    start = re.match(r"[ \t]*(?:-[ \t]+)?", found[0])
    column = start.end() if start else 0
    while (line := _LINE.match(text, at)) and line[0]:
        at = line.end()
        said, item = line[3].strip(), line[2] is not None and not after[1]
        if not said:
            continue
        deeper = line.end(1) - line.start() > column or (first and line[1] and " " not in said)
        if not (deeper or (item and line.end(1) - line.start() == column)) or (not after[1] and _MAPPING.match(said)):
            return
        if _HIDDEN.match(said) or (item and _letters(name) == "secrets"):  # Docker and Kubernetes list their names
            return
        first, begin = False, line.start(3) if item or not line[2] else line.start(2)
        begin += len(text[begin : line.end(3)]) - len(text[begin : line.end(3)].lstrip())
        end = begin + len(text[begin : line.end(3)].rstrip())
        if end - begin > 1 and text[begin] in "\"'" and text[end - 1] == text[begin]:
            begin, end = begin + 1, end - 1
        if not _is_nothing(name, text[begin:end]) and not text.startswith(("{{", "${", "$("), begin):
            yield begin, end


def _value(text: str, at: int, bare: re.Pattern[str] = _WORD) -> tuple[int, int]:
    """Where the value is that begins here; an empty place if there is none."""
    if prefix := _PREFIX.match(text, at):
        at = prefix.end()
    if bare is not _IN_LINE or text.startswith(("[", '"', "'"), at):
        if opened := _OPEN.match(text, at):
            return opened.end(), _closing(text, opened.end())
        if enclosed := _ENCLOSED.match(text, at):
            return enclosed.span(enclosed.lastindex or 0)
    found = bare.match(text, at) or _WORD.match(text, at)
    return found.span() if found else (at, at)


def _bare(form: str, found: re.Match[str]) -> re.Pattern[str]:
    """What a value without quotes is here: an argument in quotes ends with them."""
    if form == "flow":
        return _IN_FLOW
    text, start = found.string, found.start(form)
    quoted, dash = start > 0 and text[start - 1] in "\"'", found[form].startswith("-")
    if form != "name" or not (quoted or dash):
        return _WORD
    if not quoted or not dash:
        return _ARGUMENT_WORD
    return _IN_ESCAPED if text[start - 2 : start - 1] == "\\" else _IN_QUOTES[text[start - 1]]


def _closing(text: str, at: int) -> int:
    """Where the bracket ends that was opened before, or the text."""
    depth = 1
    for part in _PART.finditer(text, at):
        depth += 1 if part[0] in "[({" else -1 if part[0] in "])}" else 0
        if not depth:
            return part.start()
    return len(text)


def _is_computed(name: str, text: str, at: int) -> bool:
    """Whether SQL or code makes this of a column: `token = lower(o.token)`. With a text in it, it may be a secret."""
    if (call := _COMPUTED.match(text, at)) is None:
        return False
    if (end := _closing(text, call.end())) > call.end() + 400:  # too much to look at again and again
        return False
    arguments = text[call.end() : end].replace("''", "")
    words = {_letters(word) for word in re.findall(r"\w+", arguments)}
    known = _COMPUTES.fullmatch(call[1].rpartition(".")[2].lower()) is not None
    return not set("\"'") & set(arguments) and (known or _letters(name.rpartition(".")[2]) in words)
