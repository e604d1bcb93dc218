"""What is refused: a named error that says what, where and what to do, before anything on disk has changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from damage import tree

from qewqew_core import QewQewError

Errors = type[Exception] | tuple[type[Exception], ...]


@contextlib.contextmanager
def refused(folder: Path, error: Errors, match: str | None = None, path: Path | None = None) -> Iterator[pytest.ExceptionInfo]:
    """The block raises this error, about this path, with this hint, and changes nothing below the folder."""
    before = tree(folder)
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert tree(folder) == before
    assert isinstance(caught.value, QewQewError)
    if path is not None:
        assert caught.value.path == str(path)
