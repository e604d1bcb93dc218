"""Where passwords are in the URLs of a text, but not what a template will give."""

from __future__ import annotations

import re
from collections.abc import Iterator

SLASH = r"\\{0,7}/"  # also as JSON escapes it
TEMPLATE = re.compile(  # what a template or a shell will give, without a text of its own
    r"\{\{(?:[^{}\"'|]|[\"']\w{0,64}(?i:pass|pwd|secret|token|key|conn)\w{0,64}[\"']){0,200}\}\}|\$\{\w[\w.]{0,100}\}|\$\([^()\"']{0,200}\)"
    r"|\$\w*(?i:password|passwd|secret|token|_key)\b|%\(\w{1,64}\)s|<[a-z][a-z _-]{1,40}>"
)
_BEGINS_URL = re.compile(rf"(?<![/\\])(:?)((?:{SLASH}){{1,3}})")
_URL = re.compile(r"""(?:[^\s"'`<>,;]|["'`](?![\s,;:)\]}>\\"'`]|$)|[<>](?![\s"',)]|$)|[,;](?![\w+]{2,20}://))*""")
_PORT_IS = r"\d{1,5}|port|[$%]?[({<]+[^\s/@]{0,40}port[^\s/@]{0,40}?[)}>]+s?|\$\w{0,40}port\w{0,9}|%[sd]|\{\d?\}"
_PORT = re.compile(rf"(?i)(?:{_PORT_IS})(?:[/?#,;\\\"'`<>\s]|$)")
_IPV6 = re.compile(r"\[[0-9A-Fa-f:.%]{2,60}\]")
_LOGIN = re.compile(r"[^\s/:@]{1,64}:[^\s/@]{1,256}@")
_HOST = re.compile(r"@(?=[\w\[{$<%])(?!sha256:)")


def passwords_in_urls(text: str) -> Iterator[tuple[int, int]]:
    """Passwords of URLs, to the last `@` before another URL begins; for HTTP and git also a user without one, a token."""
    run = done = last = 0
    for url in _BEGINS_URL.finditer(text) if "@" in text else ():
        scheme = text[max(0, url.start() - 9) : url.start()].lower() if url[1] else ""
        at = url.end()
        slashes = url[2].count("/")
        if at < done or (slashes < 2 and not scheme[-2:].isalnum()):
            continue
        is_file, is_login = scheme.endswith("file"), _LOGIN.match(text, at) is not None
        if (slashes == 3 and (is_file or not is_login)) or (slashes == 1 and is_file and not is_login):  # it is a path
            continue
        if at > run and (whole := _URL.match(text, at)):
            last = text.rfind("@", at, run := whole.end())
        if (end := run) < at or last < at:
            continue
        authority = path.start() if (path := re.compile("[/?#]").search(text, at, end)) else end
        colon = text.find(":", at, authority)
        if colon >= 0 and not _IPV6.match(text, at) and not _PORT.match(text, colon + 1, end):
            first = text.find("@", colon, end)
            if text[colon + 1 : first] not in ("", "x-oauth-basic") and first > colon:
                done = last
                while done > first and not _HOST.match(text, done):
                    done = text.rfind("@", first, done)
                if not TEMPLATE.fullmatch(text, colon + 1, done):
                    yield colon + 1, done
                continue
            authority = colon
        user = authority if authority == colon else text.rfind("@", at, authority)
        if user > at and scheme.endswith(("http", "https", "git")):
            yield at, user
