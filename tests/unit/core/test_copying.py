"""What owns a descriptor or a lock is not copied: the copy would close them under the original."""

from __future__ import annotations

import ast
import copy
import gc
import importlib
import inspect
import os
import pickle
import pkgutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import qewqew_core
from qewqew_core import Queue, Reader, Stage, Topic
from qewqew_core.disk.descriptors import NotCopied

COPIES: list[Callable[[Any], object]] = [copy.copy, copy.deepcopy, pickle.dumps]
OWNED = {"Descriptors", "Lock", "RLock", "Condition", "Event", "socket", "Bell", "HeaderLock", "Journal", "Engine", "Stage"}
LISTS = ("descriptors", "fds", "claim", "owned")  # what lists of descriptors are called


def classes() -> Iterator[type]:
    for module in pkgutil.walk_packages(qewqew_core.__path__, "qewqew_core."):
        if not module.name.endswith("__main__"):
            for _, found in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
                if found.__module__ == module.name:
                    yield found


def owns(found: type) -> bool:
    """Whether it closes something, or makes what has to be closed, or keeps descriptors."""
    if any(inspect.isfunction(vars(found).get(name)) for name in ("__del__", "close")):
        return True
    for node in ast.walk(ast.parse(inspect.getsource(found).lstrip())):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            mine = [ast.unparse(target) for target in targets if ast.unparse(target).startswith("self.")]
            made = ast.unparse(node.value.func).rpartition(".")[2] if isinstance(node.value, ast.Call) else ""
            if mine and (made in OWNED or any(name.endswith(LISTS) for name in mine)):
                return True
    return False


OWNERS = sorted({found for found in classes() if owns(found)}, key=lambda found: found.__qualname__)


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner.__qualname__)
@pytest.mark.parametrize("copied", COPIES)
def test_no_object_that_owns_a_descriptor_or_a_lock_can_be_copied(owner: type, copied: Callable[[Any], object]) -> None:
    assert issubclass(owner, NotCopied)
    with pytest.raises(TypeError, match="cannot be copied or pickled: it has open files and locks"):
        copied(owner.__new__(owner) if not inspect.isabstract(owner) else type("Made", (owner,), {"close": None})())


def test_the_owners_are_found() -> None:
    names = {owner.__name__ for owner in OWNERS}
    assert names >= {"Queue", "Session", "Stage", "Topic", "TopicSession", "Writer", "Reader", "Journal", "Engine", "Chain"}
    assert names >= {"HeaderLock", "Lead", "Bell", "Descriptors", "Request", "SharedLog", "View", "Blocks", "Appends", "_Waker"}


@pytest.mark.parametrize("copied", COPIES)
def test_after_a_refused_copy_the_original_goes_on_and_keeps_its_files(tmp_path: Path, copied: Callable[[Any], object]) -> None:
    with Queue(tmp_path / "q") as queue, Topic(tmp_path / "t") as topic, Stage(tmp_path / "other") as stage:
        queue.put_many([b"1", b"2"])
        topic.append(b"1")
        batch = queue.lease("key", max_records=1)
        stage.put(b"1")
        with queue.session() as session, topic.session() as appends, topic.reader("one") as reader:
            session.put(b"3")
            appends.append(b"2")
            before = sorted(os.listdir("/proc/self/fd"))
            for each in (queue, topic, batch, stage, session, appends, reader):
                with pytest.raises(TypeError, match=f"a {type(each).__name__} cannot be copied or pickled"):
                    copied(each)
            gc.collect()
            assert sorted(os.listdir("/proc/self/fd")) == before
            assert reader.read().body == b"1"
            reader.commit()
        stage.commit()
        batch.ack()
        assert list(queue) == [b"2", b"3"]
        assert [message.body for message in topic] == [b"1", b"2"]
    with Queue(tmp_path / "other") as other:
        assert list(other) == [b"1"]


@pytest.mark.parametrize("kind", [Queue, Topic, Reader])
def test_an_object_that_nobody_has_any_more_is_gone_at_once(tmp_path: Path, kind: type[Any]) -> None:
    """It refers to itself nowhere: Python's garbage collector would close it some time later, in the middle of something else."""
    gc.collect()
    gc.disable()
    try:
        with Queue(tmp_path / "q") as queue, Topic(tmp_path / "t") as topic, topic.reader("r") as reader:
            made = weakref.ref({Queue: queue, Topic: topic, Reader: reader}[kind])
        del queue, reader, topic
        assert made() is None
    finally:
        gc.enable()
