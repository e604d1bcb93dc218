"""What leaves a task, without secrets: reasons, notices, XComs, events and lineage, and errors of others about a URL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from airflow.providers.common.compat.sdk import redact

from qewqew_core.errors import QewQewError, StoreError
from qewqew_core.secrecy import hide, secrets_of


def masked(value: Any, name: str = "") -> Any:
    """The same, with all texts as Airflow shows them: it knows the secrets of connections and variables, we those of URLs, and
    of what has a ``name`` that says so.
    """
    match value:
        case str():
            return redact(hide(value, {name: value}))
        case Mapping():
            return {name: masked(each, str(name)) for name, each in value.items()}
        case list() | tuple():
            return [masked(each, name) for each in value]
    return "…" if any(secrets_of(name, value)) else value


@contextmanager
def hidden_in_errors(url: str) -> Iterator[None]:
    """Raise `StoreError` instead of an error that shows a secret of this URL, or has one in what it came from."""
    try:
        yield
    except QewQewError:
        raise
    except Exception as error:
        each: BaseException | None = error
        while each is not None:
            if hide(str(each), {"url": url}) != str(each):
                raise StoreError(f"{type(error).__name__}: {hide(str(error), {'url': url})}", path=url) from None
            each = each.__cause__ or each.__context__
        raise
