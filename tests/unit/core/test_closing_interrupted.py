"""Ctrl-C while a queue is opened, closed, or used by a session: nothing stays locked, open or hidden.

docs/durability.md: closing is finished by the next `close`, or by opening the queue again, whatever has interrupted it.
"""

from __future__ import annotations

import contextlib
import gc
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from disk import NoSync
from interrupting import interrupts
from plain import crashed, forget_log

from qewqew_core import Broken, Closed, Locked, Queue

# A `__del__` that meets an object which an interrupt has left half made.
pytestmark = pytest.mark.filterwarnings(r"error:[\s\S]*AttributeError:pytest.PytestUnraisableExceptionWarning")

MODULES = (
    "queue/queue",
    "disk/engine",
    "queue/chain",
    "queue/records",
    "queue/holds",
    "queue/recovery",
    "disk/lock",
    "disk/ofd",
    "disk/journal",
    "queue/session",
    "disk/files",
    "disk/descriptors",
    "disk/directories",
    "queue/stamp",
)


def opened(path: Path) -> Queue:
    return Queue(path, chunk_size=64, sync="never", lock_timeout=0, _files=NoSync())


RECORDS = [b"%d" % number for number in range(30)]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("then", ["closed again", "opened again", "collected"])
@pytest.mark.parametrize("records", [RECORDS, []])
def test_a_close_that_was_interrupted_anywhere_is_finished(tmp_path, every, then, records):
    for interrupt in interrupts(every, MODULES, quick=8, full=4):
        path = tmp_path / str(interrupt.point)
        q = opened(path)
        q.put_many(RECORDS)
        if not records:
            q.get_many(100)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            q.close()
        with pytest.raises((Closed, Broken)) if q._engine.closed_reason else contextlib.nullcontext():
            len(q)
        if then == "closed again" or q._engine.closed_reason is None:  # interrupted before it had begun
            q.close()
        elif then == "collected":
            del q
            gc.collect()
        with opened(path) as again:
            assert list(again) == records
            assert again.verify().ok
        if then == "opened again":
            q.close()
            with opened(path) as again:  # which must not take the lock of others away
                assert list(again) == records
                q.close()
                with pytest.raises(Locked):
                    opened(path)
        q = None
    assert interrupt.point > 60


@pytest.mark.parametrize("left", ["closed", "crashed", "without its log"])
def test_an_opening_that_was_interrupted_anywhere_leaves_nothing_open_or_locked(tmp_path, every, left):
    (tmp_path / "live").mkdir()
    with opened(tmp_path / "live" / "q") as q:
        q.put_many(RECORDS)
        image = crashed(tmp_path / "live").parent
    if left != "crashed":
        image = tmp_path / "live"
    if left == "without its log":
        forget_log(image / "q")
    for interrupt in interrupts(every, MODULES, quick=10, full=5):
        path = shutil.copytree(image, tmp_path / str(interrupt.point)) / "q"
        q = None
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            q = opened(path)
        if q is not None:
            q.close()
        q = None
        gc.collect()
        with opened(path) as q:
            assert list(q) == RECORDS, interrupt.where
    assert interrupt.point > 100


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_a_session_took_is_hidden_from_nobody_once_it_was_interrupted_and_rolled_back(tmp_path, every):
    """docs: records that were taken are at their place again."""

    def work(q: Queue) -> None:
        with q.session() as one, q.session() as other:
            one.get_many(3)
            other.get()
            one.get()
            one.get_many(2)
            other.rollback()
            other.get_many(3)
            raise KeyError

    with opened(tmp_path / "q") as q:
        q.put_many(RECORDS)
        for interrupt in interrupts(every, MODULES, quick=6, full=3):
            with contextlib.suppress(KeyboardInterrupt, KeyError), interrupt:
                work(q)
            gc.collect()  # sessions that were interrupted while they closed
            assert (len(q), list(q)) == (len(RECORDS), RECORDS), interrupt.where
    assert interrupt.point > 200


def test_real_signals_in_sessions_and_closes(tmp_path):
    """The interrupts that no line of Python shows: between any two of its instructions."""
    luck = random.Random(15)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupted = 0
    try:
        for number in range(100):
            q = opened(tmp_path / str(number))
            q.put_many(RECORDS)
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, luck.uniform(1e-5, 1e-3))
                    with q.session() as s:
                        s.get_many(3)
                        s.get()
                        raise KeyError
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except (KeyboardInterrupt, KeyError) as error:
                interrupted += isinstance(error, KeyboardInterrupt)
            s = None
            gc.collect()
            assert list(q) == RECORDS
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, luck.uniform(1e-5, 1e-3))
                    q.close()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            q.close()
            with opened(tmp_path / str(number)) as q:
                assert list(q) == RECORDS
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 15


def test_what_is_closed_and_kept_until_the_interpreter_ends_says_nothing(tmp_path):
    program = """
        import sys
        from qewqew_core import Queue, Topic

        with Queue(sys.argv[1] + "/q") as queue, Topic(sys.argv[1] + "/t") as topic, topic.reader("r") as reader:
            queue.put(b"1")
            topic.append(b"2")
            session = queue.session()
            print(session.get(), reader.read().body)
            session.commit()
        # What the interpreter does at its end with modules that are still in use, by a thread or by C.
        for name, module in list(sys.modules.items()):
            if name.startswith("qewqew_core."):
                vars(module).update(dict.fromkeys(vars(module)))
        del queue, topic, reader, session
    """
    run = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'1' b'2'\n", "")
