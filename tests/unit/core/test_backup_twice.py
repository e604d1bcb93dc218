"""A second backup into the same directory, or a restore over what is there: a batch is at its old place and at its new one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from disk import NoSync
from test_reserve import RECORDS, Opened, a_queue, each, fill

from qewqew_core import repair, repair_topic
from qewqew_core.batch.places import BATCHES, DEAD

CALLS = {"to_dead_letters": DEAD, "return_to_queue": BATCHES}


def begun(source: Any, call: str) -> None:
    batch = source.lease("key", max_records=5)
    if call == "return_to_queue":
        batch.to_dead_letters()


def found(source: Any, call: str) -> Any:
    (batch,) = source.dead() if call == "to_dead_letters" else source.batches()
    assert batch.state == ("dead" if call == "to_dead_letters" else "returned")
    return batch


@each
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", ["opened", "repaired"])
@pytest.mark.parametrize("lost", ["nothing", "a file", "half of a file", "the manifest"])
def test_a_batch_that_is_at_two_places_is_at_the_one_that_the_log_says(
    tmp_path: Path, opened: Opened, call: str, how: str, lost: str
) -> None:
    live, backup = tmp_path / "live", tmp_path / "backup"
    live.mkdir()
    fill(live, opened)
    with opened(live, NoSync()) as source:
        begun(source, call)
        shutil.copytree(live, backup)
        batch = (source.dead() or source.batches())[0]
        getattr(batch, call)()
        shutil.copytree(live, backup, dirs_exist_ok=True)
    homes = [path for path in backup.rglob("*") if path.name.endswith((BATCHES, DEAD))]
    assert len(homes) == 2
    (there,) = next(home for home in homes if home.name.endswith(CALLS[call])).iterdir()
    (segment,) = (file for file in there.iterdir() if file.suffix != ".json")
    match lost:
        case "a file":
            segment.unlink()
        case "half of a file":
            segment.write_bytes(segment.read_bytes()[:20])
        case "the manifest":
            (there / "manifest.json").unlink()
    if how == "repaired":
        (repair if opened is a_queue else repair_topic)(backup / "s")
    with opened(backup, NoSync()) as source:
        assert list(found(source, call)) == RECORDS[:5]
        assert source.lease("rest" if call == "to_dead_letters" else "key").records
    assert [home.name for home in homes if (home / there.name).exists()] == [there.parent.name]
