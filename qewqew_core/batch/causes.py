"""Which reasons belong together, so that batches that are dead for one cause are looked at, returned and dropped together."""

from __future__ import annotations

import re

LONGEST = 300  # characters of a cause: what comes later in a reason tells no causes apart
_ATTEMPT = re.compile(r"attempt \d+ of \d+: ")  # which `Leases` writes before it
_OF_ONE_BATCH = re.compile(
    # Codes tell causes apart
    r"(?P<code>\b(?:exit(?:ed with| code| status)?|status(?: code)?|error code|http(?:/[0-9.]{1,3})?|errno|signal)[ :=]{1,3}"
    r"-?[0-9]{1,3}\b|\bSQLSTATE[ :=]{1,3}[0-9A-Z]{5}\b)|"
    r"""(?:[\w.+-]{1,20}:|~|[.]{1,2}|(?<!\w))/[^\s'"`<>|,;()\[\]{}]*"""  # a path or URL, but not the slash of "I/O"
    r"|(?<![0-9a-z])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9a-z])"  # a UUID
    r"|(?<![0-9a-z])(?:0x[0-9a-f]+|(?=[a-f]*[0-9])[0-9a-f]{8,})(?![0-9a-z])"  # an id, as those of batches
    r"|(?<![0-9a-z])[0-9]+(?:[.,:_-][0-9]+)*|[0-9]+(?:[.,:_-][0-9]+)*(?![0-9a-z])",  # a number, a date, not the 4 of "Py4J"
    re.IGNORECASE,
)


def cause_of(reason: str) -> str:
    """Return the reason without what is of one batch: the attempt; "…" is for each path, URL, id, and number but a code."""
    shown = _OF_ONE_BATCH.sub(lambda found: found["code"] or "…", reason[_end_of_attempt(reason) :])
    return " ".join(shown.split())[:LONGEST]


def _end_of_attempt(reason: str) -> int:
    found = _ATTEMPT.match(reason)
    return 0 if found is None else found.end()
