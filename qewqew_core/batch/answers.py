"""What the errors of a store's client say: s3fs, gcsfs and adlfs each keep the answer elsewhere."""

from __future__ import annotations

_PASSES = (408, 409, 425, 429)  # of the answers from 400 to 499: those after which one tries again


def status_of(error: BaseException) -> int | None:
    """The status of the answer that a client's error is about: of s3fs, gcsfs and adlfs, which each keep it elsewhere."""
    for each in (error, error.__cause__):
        answer = getattr(each, "response", None)
        found = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
        for value in (found, getattr(each, "status_code", None), getattr(each, "code", None)):
            if str(value).isdecimal():
                return int(str(value))
    return None


def is_final(error: Exception) -> bool:
    """Whether the store has said no, or was never asked: trying again does not help."""
    status = status_of(error)
    if status is not None and (status < 500 or status == 501):
        return status >= 400 and status not in _PASSES
    return isinstance(error, (PermissionError, TypeError, ValueError)) or "Credential" in type(error).__name__
