"""Acknowledged batches go when their retention is over, also from a queue or reader that has nothing left to acknowledge."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from stores import STORES

from qewqew_core import BatchExpired

ENDS: dict[str, Callable[[Any], object]] = {
    "return_expired": lambda source: source.return_expired(),
    "a lease of nothing": lambda source: source.lease("new"),
}


@pytest.mark.parametrize("setting", [{"retention": timedelta(0)}, {"retention_bytes": 0}], ids=["time", "bytes"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", STORES)
def test_a_smaller_retention_frees_what_a_store_that_has_processed_everything_keeps(
    kind: str, end: str, setting: dict[str, Any], tmp_path: Path
) -> None:
    made, (_, size) = STORES[kind]
    store = made(tmp_path / "it", size, "commit")
    for number in range(3):
        store.put_many([b"x" * 100] * 20)
        store.leasing.lease(f"run {number}").ack()
    directories = [Path(batch.manifest_path).parent for batch in store.leasing.acknowledged()]
    ENDS[end](store.leasing)
    assert len(store.leasing.acknowledged()) == 3, "they are kept as long as they should be"
    store.close()
    store = made(tmp_path / "it", size, "commit", **setting)
    assert len(store.leasing.acknowledged()) == 3, "opening alone removes nothing"
    ENDS[end](store.leasing)
    assert store.leasing.acknowledged() == []
    assert [len(list(directory.iterdir())) for directory in directories] == [1, 1, 1]  # the manifests, for people
    with pytest.raises(BatchExpired):
        store.leasing.lease("run 1")
    store.close()
