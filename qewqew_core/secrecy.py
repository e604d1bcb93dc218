"""What is a secret in an option, a URL or a text: this decides for command lines, errors, plans, reasons and logs alike.

A name tells of one (`_is_secret`), unless what follows it says otherwise (`_is_shown`): a type, a count, an error's sentence. A
URL, login, header or key in PEM needs none. What `references` read is hidden whatever its form. All takes time in proportion.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from itertools import chain
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from qewqew_core.urls import SLASH, TEMPLATE, passwords_in_urls

# Parts of names, in small letters and without signs. What ends in one of `_ABOUT` tells where a secret is, or its kind or size.
_ABOUT = (
    "s?(?:(?:refresh|renewal|rotation|reset|hash|validation|min|max)(?!$)|encryption|character|expir(?:y|es(?:at|in)?)|file|path"
    "|location|encoding|provider|class|type|ur[il]|endpoint|id|name|mechanism|version|polic(?:y|ie)|algorithm|method|scheme|format"
    "|strategy|interval|timeout|lifetime|duration|issuer|audience|scope|arn|length|count|limit|size|bit|ttl|binding|env(?:var)?"
    "|header|(?:chang|creat|issu|refresh|revok|rotated|updated)(?:ed)?at|(?<=in|ry|me|ut|al|on)(?:ms|seconds?|minutes?|hours?|days?))+s?$"
)
_NAME = re.compile(
    "(?:(?>passw(?:or[dt])?|passphrase|passcode|passkey|(?<!driver)(?<!executor)secret(?!ary)|(?<!max)token(?!iz)|jwt|credential|jaas"
    "|authorization|connectionstring|signature|azuresas|serviceaccountjson(?!keyfile$)|ssecustomerkey|keyfilecontent|pvtkey|fernetkey"
    "|(?:private|access|account|api|shared|storage|master|encryption|signing|service|hmac|license|cipher|auth|ssh|client|app|aes"
    f"|session|deploy|subscription)key)(?!{_ABOUT})|(?:(?<!com)(?<!by)(?<!sur)pass|pwd|auth|sas|sig|bearer|dsn|[mt]?otp|mfa|cookies?"
    "|creds?|(?:bind|root|db|user)pw|webhook(?:ur[il])?)(?:code|value|data|text|string)?$|secretid$|hmac$|authuserinfo$"
    "|(?:jsession|phpsess)id$|^fskey$)"
)
# Not in `shopping`
_WORD = re.compile("(?:^|[^A-Za-z])(?i:pin|pw|psk)(?:[^A-Za-z]?(?i:code))?$|[a-z](?:Pin(?:Code)?|P[Ww])$|_PAT$")
_MANY = re.compile("(?:password|secret|token|cookie|key)s(?:used|left|remaining|total|count|in|out|per[a-z]+)?$")
# Not even then: references to Kubernetes' and Vault's secrets, a column with such a name, and errors
_NO_NAME = re.compile("^sparkkubernetes(?:driver|executor)secret|pullsecrets?$|injectsecret|column|(?:error|exception)$")
_ERROR = re.compile(  # `SignatureDoesNotMatch`, `InvalidToken`
    "(?:[A-Z][a-z0-9]+)*?(?:(?:Expired|Invalid|Missing|Unknown|Unexpected|Bad|Malformed|Incorrect|Wrong)(?:[A-Z][a-z]+)+"
    "|(?:Expired|Invalid|Mismatch|Match|Found|Missing|Required|Failed|Failure|Denied|Revoked|Unavailable|Rejected)(?:Fault)?)"
)
_ANY = "pass pwd pat pw psk secret token jwt jaas cred auth connection sig sas key dsn otp mfa cookie hook bearer hmac pin sess %"
_SCHEMA = re.compile("(?i)schemas?$")  # names fields, which may have any name
_CONF = re.compile(r"[._|]|[a-z][A-Z]|^(?:[A-Z]+|passphrase|apikey|(?:bind|root)pw)\s")  # begins no sentence

# Values that hide nothing, in any text: no, a type, a parameter of a statement, a mark of something hidden
_TYPE = (
    r"(?:Optional\[)?(?:str|bytes|string|binary|bool(?:ean)?|(?:small|tiny|big)?int(?:eger|\d{1,2})?|byte|short|long|float\d{0,2}|double"
    r"|real|(?:n?var)?char|decimal|numeric|date(?:time)?|time|timestamp(?:_[nl]?tz)?|text|[bc]lob|bytea|uuid|jsonb?|object|any"
    r"|(?:array|map|struct|list|dict)(?:[<\[][\w<>\[\], :]{1,200}[>\]])?)(?:\(\d{1,9}(?:, ?\d{1,9})?\))?\]?"
)
_NOTHING = re.compile(
    rf"(?i)|true|false|yes|no|on|off|none|null|kerberos|ldap|ntlm|basic|bearer|oauth2|\?|%s|%d|\$\d|%|\$|\*+|…"
    r"|[<\[(]?(?:redacted|hidden)[>\])]?"
    rf"|{_TYPE}(?: \| None)?(?: = None)?(?:\)(?: -> [^\n]{{1,99}})?:?)?(?:(?: not)? null| primary key| unique)*"
    # where a key is: its ARN, its name at Google, an alias at AWS
    r"|arn:aws[\w-]*:[\w-]+:[\w-]*:\d*:[\w/:.+=@-]{1,200}|projects/[\w-]{1,64}/(?:locations|secrets)/[\w/-]{1,200}|alias/[\w/-]{1,200}"
)
_MECHANISM = re.compile("(?i)(?:no-?)?sasl|plain|simple|gssapi|digest|cert(?:ificate)?|m?tls|ssl|iam|jwt|token|password|scram.*")
_FILE = re.compile(r"(?:/|\./|~/)[\w./-]+\.[A-Za-z]{2,5}")  # of credentials
_FILE_NAME = re.compile(r"(?i)\.(?:qew|zbus|jsonl?|[ct]sv|parquet|avro|txt|log|ya?ml|toml|ini|conf|py|sh|sql|gz|lock|pem|crt)$")
# Sentences of errors after `NAME: `, and the words that they may have, unlike secrets
_SENTENCE = re.compile(
    r"(?i)(?:(?:expected|found|got) [\w<'\"]|(?:field|value)? ?(?:is )?required\b|(?:missing|invalid|expired|empty|unset)\W*$"
    r"|(?:must|should|cannot|can ?not|can't|may|could|was|is|are|has|have|does|did|do) (?:not |been |only )?[a-z]{2,20}\b"
    r"|(?:not|no|no such|too|(?:un|in)[a-z]{4,12}|unable to|failed to|missing|wrong|none of) [a-z]{2,20}\b"
    r"|(?:the|this|your|a|an|each) [a-z]{2,20}\b [a-z]{2,20}|error |unauthorized|forbidden|extra input|line \d"
    r"|(?:permission|access) denied|end of)"
)
_PLAIN = re.compile(r"\W*(?:[A-Za-z]{1,24}(?:[-'_./:$][A-Za-z]{1,24})*|\d[\d.,:-]{0,19}|[A-Z]{1,8}\d{1,3}|(?i:utf-?\d\d?)|)\W*")
_OPTIONS = re.compile(r"(?i:options|properties)\s?\([^()]*$")  # of Spark's SQL
_DEEP = r"(?:[^\"'()]|''|\((?:[^\"'()]|''|\((?:[^\"'()]|''|\([^\"'()]*+\))*+\))*+\))*+"
_COMPUTED = re.compile(rf"([A-Za-z_](?:\w|\.(?!\.)){{0,60}})\(({_DEEP})\)")  # by SQL or code, of a column
_COMPUTES = re.compile(
    "(?:lower|upper|l?r?trim|coalesce|nvl2?|ifnull|nullif|concat(?:_ws)?|md5|sha[125]?(?:256|512)?|crc32|xxhash64|hash|(?:try_)?cast|"
    "substr(?:ing)?|left|right|regexp_\\w+|replace|translate|encode|decode|(?:to_|from_|un)?(?:base64|hex)|uuid|col|max|min|count|"
    "first|last|any_value|(?:get_)?json_\\w+|length|split|reverse|mask|digest)"
)
_IS_TYPE = re.compile(rf"(?i){_TYPE}(?:(?: not)? null| primary key| unique| default null)*(?:[,;)}}>\]]|$)")
_IN_SQL = re.compile(r"\d{1,3}|:[A-Za-z_]\w*")  # where there is a space before the value: `token = 1`
# After `pass=12`, and in a sentence: `use --password or --file`
_PASSED = re.compile(r"[ ,;]{1,2}(?i:fail|skip|error|warn|xfail|total)")
_AFTER_FLAG = re.compile(
    r"(?i)(?:or|and|is|are|was|to|for|with|from|in|on|of|as|by|if|option|flag|must|requires|needs|not)(?!\w)"
)
_QUOTE = r"\\{0,15}[\"'`]"
_TYPED = rf":\s{{0,3}}(?i:[\w.]{{0,9}}{_TYPE}|final)(?:\s?\|\s?None)?\s{{0,3}}="  # `password: str = …`
_SIGN = rf"\s{{0,9}}(?:[=-]>|:=|={{1,3}}|{_TYPED}|:|\\{{1,2}}u003[da])(?:\s{{0,9}}(?={_QUOTE})|[ \t]{{0,9}})"
_STRING = r"(?=(?:[ENBXenbx]|[Uu]&)?['\"]|\$(?:[A-Za-z_]\w{0,60})?\$)"  # of SQL
_NAMED = (
    rf"(?<![\w.%-])(?:(?P<flag>-(?>[\w.%-]+))(?:(?P<set>{_SIGN})|{_QUOTE},\s{{0,9}}(?={_QUOTE})|[ \t]{{1,9}}(?=[^\s-]))"
    rf"|(?P<name>(?>[\w.%-]+))(?:(?P<sign>(?:{_QUOTE}\]?|&\w{{2,4}};|(?:,[\w ,]{{1,99}})?\)(?==))?{_SIGN})"
    rf"|(?P<xml>(?=(?:\s{{1,9}}[\w:.-]{{1,40}}=[\"'][^\"'<>]{{0,200}}[\"']){{0,9}}\s{{0,9}}>))|(?P<sql>\s{{1,9}}{_STRING})"
    rf"|(?P<call>\((?=b?{_QUOTE}))|(?P<pair>{_QUOTE}\s{{0,9}},\s{{0,9}}(?=b?{_QUOTE}))"
    r"|(?P<conf>[ \t]{1,40}(?:\|[ \t]{1,9})?(?=[^\s|:=]+={0,2}[ \t]*(?m:$)))))"
)
_PREFIX = re.compile(r"""(?:[bBfFrRuUeEnNxX]{1,2}|[uU]&)(?=["'](?!\s?[,:)\]}]))""")  # b'…', E'…', U&'…'
_OPENS = re.compile(r"""(?:[A-Za-z]\w{0,40}(?=\(\s{0,9}[bru]?["']))?[\[(]|\{(?=\s{0,9}["'])""")  # SecretStr('…'), ['…'], {'…'
_ELEMENT = re.compile(r"\s*+(?:<!\[CDATA\[((?s:.){1,400}?)\]\]>|(?:<!\[CDATA\[)?([^<]++)(?=</))")  # of XML, up to its end
_LINES = re.compile(r"""<<[-~]?["']?([A-Z_]{2,20})["']?\r?\n|('{3}|"{3})""")  # <<EOF
_OPENS_QUOTE = re.compile(r"(\\{0,15})([\"'`])")
_ENCLOSED = re.compile(  # $$it's$$, {{ x }}, and {a}}b} of ODBC
    r"""(?s:\$((?:[A-Za-z_]\w{0,60})?)\$((?:(?!\$\1\$).){1,400})\$\1\$)|\{(\{[^\n]{0,400}?\})\}|\{((?:[^}\s]|\}\}(?=[^\s,;)}"'])|\}(?=\w))*+)\}"""
)
_ENDS = r"[\s,;:)\]}>\\\"'`]|[.!?](?:\s|$)|/|$"  # after what closes a value
_NEXT = r"[\w.%-]{1,64}"  # a name
_PART = re.compile(r"""(?s:(?<!\w)"(?:[^"\\]|\\.){0,999}+"|(?:(?<!\w)|\b[A-Za-z])'(?:[^'\\]|\\.|''){0,999}+'|\\.)|[\[({})\]]""")
_BEFORE = re.compile(r"[ \t]*(?:(?:[-+>|#*?E!]|//)[ \t]+)*(?:(?:export|set|setenv|ENV|ARG)[ \t]+)?\\?[\"'`]?")
_TAG = re.compile(r"(?:!!(?:str|binary)|&[\w-]{1,64})[ \t]{1,9}(?=\S)")
_BELOW = re.compile(r"[ \t]{0,9}([|>][+-]?\d?[ \t]{0,9})?\r?\n")
_LINE = re.compile(r"((?:\+|-(?=[ \t]{2,}))?[ \t]*)(-[ \t]{1,9})?([^\r\n]*)\r?\n?")
_KEY = re.compile(r"(?:password|passwd|token|secret|key)(?=\s|$)")  # of a secret of Kubernetes: `db-secret:password`
_INNER = re.compile(r"\{(?:\s{0,9}(?:[\"'\\}\n]|[\w.-]{1,64}:\s)|\s)")
_MAPPING = re.compile(r"[\"']?[\w.-]{1,128}[\"']?:(?:\s|$)|[{\[|>&*!#]")
_ENTRY = re.compile(r"(?i)(?:^|.*\W)\w{0,20}(?:name|key|type)$")  # {"name": NAME, "value": …}, in JSON, YAML and XML
_CALLED = re.compile(rf"(?:{_QUOTE})?([\w.%-]{{1,128}})(?:{_QUOTE})?")
_OF_NAMES = re.compile(
    r"(?i)\b(?:in|of|from|by|on|using|among|key|unique|columns?|fields?|(?:into|table|index|view|on|join)\s{1,9}\S{1,64})\s{1,9}\([^()]*$"
)
_WORD_IN_QUOTES = re.compile(rf"{_QUOTE}[A-Za-z_]{{1,40}}{_QUOTE}")
_VALUE_KEY = rf"(?<![\w.-])((?i:\w{{0,20}}value))((?:{_QUOTE})?\s{{0,9}}(?:=>|[:=>])[ \t]{{0,9}})"
_VALUE_AFTER = re.compile(rf"(?:(?!\n[ \t]{{0,40}}-[ \t])[^{{}}]){{0,400}}?{_VALUE_KEY}|(())>(?=[^\s<])")
_SCHEME = re.compile(r"(?i)(?:bearer|basic|token|negotiate|ntlm|api-?key|oauth|splunk|sso-key|hmac[\w-]*|aws4[\w-]*)[ \t]{1,9}")
_TOKEN = re.compile(r"(?!(?i:username)=)[^\s\"',;…]+")
_CREDENTIALS = re.compile(r"(?!(?i:digest) )[^\s\"',;…]+(?:[ \t][^\s\"',;…]+)?")
_COOKIES = re.compile(r"""(?:"[^"\n…]*"|[^\s"';…])+(?:;[ \t]{0,2}[^\s"';=]+=(?:"[^"\n]*"|[^\s"';])*)*""")
_BY = r"identified\s{1,9}(?:with\s{1,9}\S{1,64}\s{1,9})?(?:by|as)\s{1,9}(?:(?:password|values)\s{1,9})?"
_ALONE = (  # what needs no name
    r"-{4,5} ?BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}(?P<pem>(?:[\w+/=\s:,;.\\\"'`>|#*()\[\]]|-(?!---))*)",
    rf"(?i:hooks\.slack\.com{SLASH}\w{{1,20}}|(?:webhook|\boutlook)\.office(?:365)?\.com{SLASH}webhook\w{{0,9}}|webhook\.office\.com{SLASH}"
    rf"\w{{1,20}}|discord(?:app)?\.com{SLASH}api{SLASH}webhooks|hooks\.zapier\.com{SLASH}hooks{SLASH}catch){SLASH}(?P<hook>[^\s\"'<>]+)"
    rf"|api\.telegram\.org{SLASH}bot(?P<bot>[\w:-]+)",
    r"(?i:jdbc:oracle:\w{1,9}:|\b(?:sqlplus|sqlldr|expdp|impdp)\s{1,9})[^/@\s:]{1,128}/(?P<oracle>\"[^\"]{0,128}\"|[^\s@]{0,128})@",
    r"\b(?i:bearer)\s{1,9}(?!(?i:auth\w*|credentials?|challenge|required|tokens?\b))(?!\w{1,20}=\w)(?P<bearer>[\w.~+/=-]{8,})",
    r"\b(?i:authorization\W{1,9}digest)\s[^\n]{0,400}?\b(?i:response)=[\"']?(?P<digest>[^\s\"',]+)",
    # by their shape: JWT, GitHub, GitLab, Slack, Vault, Databricks, AWS' temporary ones, Stripe, npm, Google, SendGrid
    r"\b(?P<shape>eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?|gh[pousr]_\w{20,}|github_pat_\w{20,}|gl[a-z]{2,5}-[\w-]{20,}|x(?:ox[a-z](?:\.xox[a-z])?|app)-[\w%-]{10,}"
    r"|hv[sbr]\.[\w-]{20,}|(?<![\w.])s\.(?=[A-Za-z]*\d)(?=\w*[A-Z])[A-Za-z0-9]{24}(?![\w(]|\.\w)|dapi[0-9a-f]{32}"
    r"|[sr]k_(?:live|test)_\w{10,}|whsec_[\w+/=]{10,}|npm_\w{30,}|AIza[\w-]{35}"
    r"|ya29\.[\w.-]{20,}|GOCSPX-[\w-]{20,}|1//0[\w-]{20,}|SG\.[\w-]{16,}\.[\w-]{16,})",
    rf"\b(?:(?i:{_BY})(?=[ENX]?['\"]|\$)|IDENTIFIED(?i:{_BY[10:]})|(?i:(?:user|role)\s{{1,9}}\S{{1,64}}\s{{1,9}}{_BY}"
    r"|login\s{1,9}\S{1,128}\s{1,9}password\s{1,9}|set\s{1,9}password\s{1,9}for\s{1,9}\S{1,128}\s{1,9}=\s{0,9}))",
    r"(?<![\w/])[\w.-]{1,64}:(?P<dsn>[^\s:@/\"']{1,256})@(?:(?:tcp|unix)\(|localhost\b|[\w.-]{1,99}:\d{2,5}\b)",
    r"Private-Lines: \d{1,4}\s(?P<putty>[\w+/=\s]*)",
    r"(?i:duplicate entry) '(?P<twice>[^\n]{1,400}?)' for key '(?i:[\w.]{0,64}(?:passw|token|secret|api_?key))",
    r"(?i:passw(?:or)?d|secret|token|\bkey)(?:[ \t](?i:is|was))?[ \t]{1,3}[\"'`(]{0,2}"
    r"(?P<said>(?=[\w-]{0,40}\d)(?=[\w-]{0,40}[A-Za-z])[\w.~+/=!$%^*-]{8,})",
    r"(?<![\w-])(?:-[A-Za-z]{0,6}u|--user|--proxy-user|-U)(?:[\s=]{1,9}|[\"'],\s{0,9}(?=[\"']))?(?P<quote>[\"'])?"
    r"(?!\d+:\d+\b)[^\s:\"']{1,128}:(?!//)(?P<login>(?(quote)(?:(?!(?P=quote))[^\n])+|(?:[^\s\"'\\]|[\"'\\](?=\w))+))",
    r"\b(?:(?:mysql|mariadb)[\w-]{0,9}|sshpass|redis-cli|(?:docker|podman|registry)[ '\",]{1,4}login)\b[^\n;|&]{0,200}?\s[\"']?"
    r"(?:(?:-[pa]|--pass)(?:[\"'],)?\s{1,3}|-p)[\"']?(?P<short>[^\s\"',-]\S*?)(?=[\"'](?:[\s\]),]|$)|\s|$)",
)
# Signs of these, in their order: a text has one
_SIGNS = (
    "priv|hook telegr|oracle sql dp|bearer|dige|_ - . / dapi aiza|identi login pass|@|lines|dup"
    "|pass secr token key|-|sql mari log sshp redi"
)
_OTHER_USERS = re.compile(  # their -u is a user and a group, a flag, or a branch
    r"(?:^|[\s/=;&|('\"])(?:chown|chgrp|rsync|git [a-z-]+|sudo|su|runuser|setpriv|unshare|systemd-run"
    r"|(?:docker|podman|nerdctl)(?:[\s'\",]{1,9}(?:exec|run|create|compose))*)(?:[\s'\",]{1,9}-[\w=-]+)*[\s'\",]{1,9}$"
)

_COLOUR = re.compile(r"(?:\x1b|\\{1,4}(?:x1b|u001[bB]|033))\[[0-?]{0,40}[ -/]{0,4}[@-~]")  # also as Python and JSON write it
SHORTEST = 5  # characters of what a reference gave, if neither its name nor its form says that it is a secret
LONGEST = 1000  # characters of a value that is read to see whether it hides nothing
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
        with suppress(ValueError):
            value = json.loads(value)
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


@lru_cache(1000)
def _is_secret(name: str) -> bool:
    """Whether a name tells of a secret."""
    letters = _letters(name)
    return (_NAME.search(letters) is not None or _WORD.search(name) is not None) and _NO_NAME.search(letters) is None


def _is_nothing(name: str, value: str) -> bool:
    """Whether a value says nothing: no, a type, how many, a path of credentials, or the same field of something else."""
    return len(value) <= LONGEST and (
        _NOTHING.fullmatch(value) is not None
        or (len(value) < 10 and value.isdecimal() and _MANY.search(_letters(name)) is not None)
        or (name.lower().endswith("credentials") and _FILE.fullmatch(value) is not None)
        or (name.lower().endswith("auth") and _MECHANISM.fullmatch(value) is not None)
        or (value.count(".") == 1 and _letters(value.partition(".")[2]) == _letters(name.rpartition(".")[2]))
    )


def _places(text: str) -> list[tuple[int, int]]:
    """Where the secrets in a text are, in order. They are looked for without the colours of a terminal."""
    starts, lengths = list[int](), [0]
    for colour in _COLOUR.finditer(text):
        starts.append(colour.start() - lengths[-1])
        lengths.append(lengths[-1] + len(colour[0]))
    if starts:
        plain = _places(_COLOUR.sub("", text))
        return [(start + lengths[bisect_right(starts, start)], end + lengths[bisect_left(starts, end)]) for start, end in plain]
    places: list[tuple[int, int]] = []
    for start, end in sorted(chain(_named(text), passwords_in_urls(text), _alone(text))):
        if places and start <= places[-1][1]:
            places[-1] = (places[-1][0], max(end, places[-1][1]))
        elif _NOTHING.fullmatch(text, start, end) is None:
            places.append((start, end))
    return places


@cache
def _compiled(*patterns: str) -> re.Pattern[str]:
    """Late: it takes longer than all of the others, and many a process needs none."""
    return re.compile("|".join(patterns))


def _alone(text: str) -> Iterator[tuple[int, int]]:
    """Secrets that no name tells of."""
    end, letters = 0, text.lower()
    patterns = [
        pattern for pattern, signs in zip(_ALONE, _SIGNS.split("|"), strict=True) if any(map(letters.__contains__, signs.split()))
    ]
    for found in _compiled(*patterns).finditer(text) if patterns else ():
        before = text[max(0, found.start() - 200) : found.start()]
        if found.start() < end or (found.lastgroup == "login" and _OTHER_USERS.search(before)):
            continue
        start, end = found.span(found.lastgroup) if found.lastgroup else _extent(text, found.end(), "word", "\"'")
        yield start, end


def _named(text: str) -> Iterator[tuple[int, int]]:
    """Values whose name says that they are secrets."""
    end, letters = 0, text.lower()
    for found in _compiled(_NAMED).finditer(text) if any(map(letters.__contains__, _ANY.split())) else ():
        if found.start() < end:
            continue
        form = "flag" if found["flag"] else "name"
        name, start = unquote(found[form][-200:]), found.start(form)  # the end of a name is enough
        line = (before := text[max(0, start - 20) : start]).rpartition("\n")[2]
        if before.endswith("\\") and name[0] in "nrt" and not _is_secret(name):  # the escape of a line's end
            name = name[1:]
        if name.lower() in ("key", "phrase") and (word := re.search("[A-Za-z]+ $", before)):  # `API key: …`
            name = word[0] + name
        name = name[2:] if name.startswith("-D") else name
        places: Iterator[tuple[int, int]] = iter(())
        at = text.index(">", found.end()) + 1 if found["xml"] is not None else found.end() - bool(found["call"])
        if not _is_secret(name):
            if (found["sign"] or found["xml"] is not None) and _ENTRY.match(name):
                places = _of_entry(text, start, at)
        elif not (
            (found["xml"] is not None and not re.search(r"<(?:[\w.-]+:)?$", before))
            or (before.endswith("/") and "=" in (found["sign"] or ""))  # a directory of a partition
            or (found["pair"] and not _is_pair(text, start, at))
            or (found["call"] and _ERROR.fullmatch(name))
            or (found["conf"] and not (_CONF.search(name + found["conf"]) and _BEFORE.fullmatch(line)))
        ):
            places = _values(name, text, start, at, found["sign"] or found["set"] or found["sql"] or "")
        for place in places:
            yield place
            end = max(end, place[1])


def _is_pair(text: str, start: int, at: int) -> bool:
    """Whether a name here and what follows are a pair, `("password", "…")`, and not names: `IN ("token", "id")`."""
    before = text[max(0, start - 200) : start]
    names = _OF_NAMES.search(before) and _WORD_IN_QUOTES.match(text, at)
    return not names and re.search(rf"\(\s{{0,40}}b?{_QUOTE}$", before) is not None


def _values(name: str, text: str, start: int, at: int, sign: str) -> Iterator[tuple[int, int]]:
    """The values that begin here after a name that says that they are secrets, if they are."""
    colon, in_quotes = ":" in sign and "=" not in sign, sign[:1] in ("\\", '"', "'", "`")
    before = text[max(0, start - 200) : start]
    line = before.rpartition("\n")[2] if "\n" in before or start <= 200 else "…"
    style = "word" if not _BEFORE.fullmatch(line) else "yaml" if colon else "line"
    if style == "yaml":
        at = tag.end() if (tag := _TAG.match(text, at)) else at
        if below := _BELOW.match(text, at):
            yield from _next_lines(name, text, len(line.rstrip("\"'")), below.end(), below[1] is not None)
            return
    of_arn = sign == ":" and (before.endswith(":") or _KEY.match(text, at))
    if of_arn or (colon and _INNER.match(text, at)):  # which is looked at by itself
        return
    if colon and not in_quotes and _letters(name).endswith(("authorization", "cookie")):
        style = "cookie" if "cookie" in name.lower() else "header"
    elif before[-1:] in ("'", '"') and not in_quotes:
        style = "argument"
    elif colon and before.rstrip()[-1:] in ("{", ","):
        style = "flow"
    shut = "".join(shut for shut, opened in zip("\"')]}", "\"'([{", strict=True) if opened in before)
    begin, end = _extent(text, at, style, shut)
    if _is_shown(name, text, at, begin, end, sign, colon and not text.startswith(("'", '"', "\\"), at)):
        return
    yield begin, end
    if style == "yaml" and (line_end := _BELOW.match(text, end)):
        yield from _next_lines(name, text, len(line.rstrip("\"'")), line_end.end(), first=False)


def _is_shown(name: str, text: str, at: int, begin: int, end: int, sign: str, prose: bool) -> bool:
    """Whether what follows a name says otherwise."""
    if end - begin > LONGEST:
        return False
    said = text[begin:end]
    template = TEMPLATE.match(text, begin if text.startswith(("'", '"'), at) else at)
    if (
        said.startswith("…")
        or (template and template.end() > end - 3 and not text[template.end() : end].strip("},;]) "))
        or all(_is_nothing(name, each.strip(" \"'")) for each in (said.rstrip("},;])"), *said.split(","))[said.count(",") > 0 :])
        or (text.startswith("{", at) and reference_of("{" + said.strip("{}") + "}"))
    ):
        return True
    if said.isdecimal() and len(said) < 7 and _PASSED.match(text, end):
        return True
    if prose:
        rest = text[at : at + LONGEST].partition("\n")[0].strip()
        error = _ERROR.fullmatch(name.rpartition(".")[2]) and text[at - 1] == " "
        sentence = (_SENTENCE.match(rest) or _FILE_NAME.search(name)) and all(map(_PLAIN.fullmatch, rest.split()))
        return bool(error or sentence or _IS_TYPE.match(rest) or re.fullmatch("[A-Z][A-Za-z]*:", said))
    if sign.isspace() and not re.search("(?i:password|key|session_?token)|SECRET$", name):  # `token 'a'` of a parser
        if _OPTIONS.search(text, max(0, begin - 200), begin):
            return False
        return len(said) < 20 and not re.fullmatch(r"(?=.*\d)(?=.*[A-Za-z])\S{8,}", said)
    if "=" in sign:
        if call := _COMPUTED.match(text, at):
            known = _COMPUTES.fullmatch(call[1].rpartition(".")[2].lower())
            return bool(known) or _letters(name.rpartition(".")[2]) in map(_letters, re.findall(r"\w+", call[2]))
        return sign[-1].isspace() and _IN_SQL.fullmatch(said) is not None
    return sign == "" and _AFTER_FLAG.match(said) is not None


def _of_entry(text: str, start: int, at: int) -> Iterator[tuple[int, int]]:
    """The value of {"name": NAME, "value": …}, in any order."""
    called = _CALLED.match(text, at)
    around = text[max(0, start - LONGEST) : at + LONGEST].lower()
    if called is None or not _is_secret(called[1]) or not ("value" in around or ">" in around):
        return
    if after := _VALUE_AFTER.match(text, called.end()):
        yield from _values(called[1], text, after.start(1) if after[1] else after.end(), after.end(), after[2] or "")
        return
    for before in reversed([*re.compile(_VALUE_KEY).finditer(text, max(0, start - LONGEST), start)]):
        begin, end = _extent(text, before.end(), "word", "\"'})]")
        if begin < end <= start and "{" not in text[end:start]:
            yield begin, end
            return


def _extent(text: str, at: int, style: str, closers: str = "") -> tuple[int, int]:
    """Where the value is that begins here; an empty place if none does."""
    tag = text[max(0, at - 11) : at].rstrip(" \t")
    if tag.endswith(">") and tag[-2:-1] not in "-=" and (element := _ELEMENT.match(text, at)):
        begin, end = element.span(element.lastindex or 0)
        return begin, begin + len(text[begin:end].rstrip())
    at = prefix.end() if (prefix := _PREFIX.match(text, at)) else at
    in_line = style in ("line", "yaml")
    if (opened := _OPENS.match(text, at)) and not (in_line and text[at] not in "[{"):
        end = _closing(text, opened.end())
        more = _bare(style, closers).match(text, end + 1) if text[end + 1 : end + 2].isalnum() else None
        return opened.end(), more.end() if more else end
    if several := _LINES.match(text, at):
        closing = re.compile(rf"{several[2]}(?={_ENDS})" if several[2] else rf"(?m:^[ \t]*{several[1]}$)").search(
            text, several.end()
        )
        return several.end(), closing.start() if closing else len(text)
    if quoted := _OPENS_QUOTE.match(text, at):
        if quoted[2] in closers and re.compile(r"\s?[,:)\]}]").match(text, quoted.end()):  # it closes what is around
            return at, at
        closing = _closing_quote(len(quoted[1]), quoted[2]).search(text, quoted.end())
        return quoted.end(), closing.start() if closing else len(text)
    if not (in_line and text.startswith("{", at)) and (enclosed := _ENCLOSED.match(text, at)):
        return enclosed.span(enclosed.lastindex or 0)
    if style in ("header", "cookie"):
        at = scheme.end() if (scheme := _SCHEME.match(text, at)) else at
        told = (_COOKIES if style == "cookie" else _TOKEN if scheme else _CREDENTIALS).match(text, at)
    else:
        told = _bare(style, closers).match(text, at)
    return told.span() if told else (at, at)


@cache
def _closing_quote(escapes: int, sign: str) -> re.Pattern[str]:
    """What ends a text in quotes: such a quote, unless it is within a word, or escaped once more."""
    escaped = rf"\\{{0,{escapes}}}" if escapes else r"(?:\\\\){0,20}"
    return re.compile(rf"(?<!\\){escaped}{sign}(?!{sign})(?={_ENDS})")


@cache
def _bare(style: str, closers: str) -> re.Pattern[str]:
    """What a value without quotes is: it ends with the quote or bracket that is open, or before another name."""
    shut = "" if style in ("line", "yaml") else closers
    free = "".join(each for each in "\"'`)]}\xa0\u202f" if each not in shut)  # also spaces that do not end a line
    another = rf"[\"']?{_NEXT}=(?!=|\s|$)|{_NEXT}\\?[\"']?:\s"
    word = rf"[;&,](?!\s|$|[{re.escape(shut)}\\]|{another})"
    more = {
        "word": word,
        "flow": rf"[;&]|,(?!\s|$|{another})|[ \t]{{1,9}}(?=[^\s,}}#])",
        "argument": rf"{word}|[ \t]{{1,9}}(?=[^\s\"'])(?!{_NEXT}=)",
        "line": rf"[;&,](?![ \t]{{0,9}}{_NEXT}=|[ \t]*$)|[ \t]{{1,40}}(?=\S)(?!#\s|--?[A-Za-z]|{_NEXT}=)",
        "yaml": rf"[;&,](?![ \t]{{1,9}}{_NEXT}:\s|[ \t]*$)|[ \t]{{1,40}}(?=\S)(?!#|{_NEXT}:\s)",
    }[style]
    goes_on = r"|\\\r?\n[ \t]{0,40}(?=\S)" if style == "line" else ""  # of properties
    ends = rf"|[{re.escape(shut)}](?!{_ENDS})|\\(?!\\{{0,15}}[{re.escape(shut)}])" if shut else r"|\\"
    return re.compile(rf"(?m:(?:[^\s;&,\"'`)\]}}<\\]|<(?!/)|[{re.escape(free)}…]{goes_on}{ends}|{more})*+)")


def _next_lines(name: str, text: str, column: int, at: int, block: bool = False, first: bool = True) -> Iterator[tuple[int, int]]:
    """The values in the lines below a name of YAML: a block, a list, or what is longer than a line."""
    while (line := _LINE.match(text, at)) and line[0]:
        at = line.end()
        said, item = line[3].strip(), line[2] is not None and not block
        if not said:
            continue
        deeper = line.end(1) - line.start() > column or (first and line[1] and " " not in said)
        if not (deeper or (item and line.end(1) - line.start() == column)) or (not block and _MAPPING.match(said)):
            return
        if said.startswith("…") or (item and _letters(name) == "secrets"):  # Docker and Kubernetes list their names
            return
        first, whole = False, text[line.start(3 if item or not line[2] else 2) : line.end(3)]
        begin = line.end(3) - len(whole.lstrip())
        end = begin + len(whole.strip())
        if end - begin > 1 and text[begin] in "\"'" and text[end - 1] == text[begin]:
            begin, end = begin + 1, end - 1
        if not _is_nothing(name, text[begin:end]) and not TEMPLATE.fullmatch(text, begin, end):
            yield begin, end


def _closing(text: str, at: int) -> int:
    """Where the bracket ends that was opened before, or the text. A secret may have others in it."""
    opened, depth = text[at - 1], 1
    closed = {"(": ")", "[": "]", "{": "}"}[opened]
    for part in _PART.finditer(text, at):
        depth += (part[0] == opened) - (part[0] == closed)
        if not depth:
            return part.start()
    return len(text)
