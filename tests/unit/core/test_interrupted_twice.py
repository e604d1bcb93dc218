"""A second Ctrl-C comes while the first one is dealt with: nothing goes on as if it was, and no lock stays."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from qewqew_core import Broken, Queue, Topic
from qewqew_core.batch import places
from qewqew_core.disk.engine import Engine
from qewqew_core.queue import batch_files, recovery


def interrupt(patch: pytest.MonkeyPatch, where: Any, name: str) -> None:
    """Ctrl-C as this function begins."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    patch.setattr(where, name, interrupted)


@pytest.mark.parametrize("of", ["queue", "reader"])
def test_a_call_whose_end_is_interrupted_too_leaves_no_object_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    records = [b"%d" % number for number in range(10)]
    owner: Any = Queue(tmp_path / "s") if of == "queue" else Topic(tmp_path / "s")
    (owner.put_many if of == "queue" else owner.append_many)(records)
    source = owner if of == "queue" else owner.reader("r")
    batch = source.lease("key", max_records=4)
    with monkeypatch.context() as patch:
        if of == "queue":
            batch.put_back()
            interrupt(patch, batch_files, "roll_forward_lease")
        else:
            interrupt(patch, places, "roll_forward_forget")
        interrupt(patch, Engine, "poison_after")
        with pytest.raises(KeyboardInterrupt):
            source.lease("again", max_records=4) if of == "queue" else batch.put_back()
    with pytest.raises(Broken, match="interrupted"):
        source.batches()
    source.close()
    owner.close()
    owner = Queue(tmp_path / "s") if of == "queue" else Topic(tmp_path / "s")
    source = owner if of == "queue" else owner.reader("r")
    leased = [record for batch in source.batches() for record in batch]
    rest = source.get_many(100) if of == "queue" else [message.body for message in source.read_many(100)]
    assert sorted([*leased, *rest]) == records
    source.close()
    owner.close()


def test_an_opening_whose_end_is_interrupted_too_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Queue(tmp_path / "q") as q:
        q.put(b"x")
    with monkeypatch.context() as patch:
        interrupt(patch, recovery, "believe")
        interrupt(patch, recovery, "close_all")
        with pytest.raises(KeyboardInterrupt):
            Queue(tmp_path / "q")
    gc.collect()
    with Queue(tmp_path / "q", lock_timeout=0) as q:
        assert list(q) == [b"x"]
