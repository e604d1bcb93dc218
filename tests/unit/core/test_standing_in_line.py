"""Who waits for a lock stands in line: at a queue, where a Java process waits until nobody does, and at a reader."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stopping import stop

from qewqew_core import Queue, Topic
from qewqew_core.disk import lock

OPEN = """
import sys
from qewqew_core import Queue
with Queue(sys.argv[1], lock_timeout=60):
    print("open", flush=True)
"""

JAVA = """
class Try {
    public static void main(String[] arguments) throws Exception {
        try (var file = new java.io.RandomAccessFile(arguments[0], "rw")) {
            System.out.println(file.getChannel().tryLock() == null ? "locked" : "free");
        }
    }
}
"""


@pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java")
def test_to_a_java_process_a_queue_is_locked_while_somebody_stands_in_line(tmp_path: Path) -> None:
    program, path = tmp_path / "Try.java", tmp_path / "q"
    program.write_text(JAVA)

    def found_by_java() -> str:
        return subprocess.run(["java", program, path], capture_output=True, text=True, check=True).stdout.strip()

    with Queue(path) as queue:
        queue.put(b"one")
        waiting = subprocess.Popen([sys.executable, "-c", OPEN, path], stdout=subprocess.PIPE, text=True)
        header = os.open(path, os.O_RDWR)
        until = time.monotonic() + 60
        while lock.first_locked(header, lock._LINE, lock._OWNERS - lock._LINE) is None:
            assert time.monotonic() < until, "it does not stand in line"
            time.sleep(0.01)
        os.close(header)
        stop(waiting.pid)
    try:
        assert found_by_java() == "locked"  # although nobody has it open
    finally:
        os.kill(waiting.pid, signal.SIGCONT)
    assert waiting.communicate(timeout=300)[0] == "open\n"
    assert found_by_java() == "free"


def test_who_waits_knows_how_many_are_before_him_however_long_the_line_has_existed(tmp_path: Path) -> None:
    """How often he looks depends on it: when places were counted, they grew, and two slept while the lock was free."""
    path = tmp_path / "header"
    path.touch()
    descriptors = [os.open(path, os.O_RDWR) for _ in range(4)]

    def join(fd: int) -> lock._Line:
        joined = lock._Line(fd)
        joined.join()
        return joined

    line = [join(fd) for fd in descriptors]
    assert [one.before() for one in line] == [0, 1, 2, 3]
    for _ in range(50):
        first = line.pop(0)
        first.leave()
        line.append(join(first._fd))
    assert [one.before() for one in line] == [0, 1, 2, 3]
    moved = line[-1].moved
    line.pop(2).leave()  # his time was over
    assert [one.before() for one in line] == [0, 1, 2]
    assert line[-1].moved > moved
    killed = line.pop(0)._fd
    descriptors.remove(killed)
    os.close(killed)
    assert [one.before() for one in line] == [0, 1]
    for fd in descriptors:
        os.close(fd)


CONSUME = """
import os, sys
from qewqew_core import Topic
path, name, calls = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Topic(path, sync="never", lock_timeout=60) as topic, topic.reader("r", redeliver_after=None) as reader:
    print(flush=True)
    sys.stdin.readline()
    turns = os.open(path + ".turns", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for _ in range(calls):
        reader.position()
        os.write(turns, name.encode())
"""


def test_of_processes_that_share_a_reader_none_has_it_much_more_often_than_another(tmp_path: Path) -> None:
    path, names, calls = str(tmp_path / "t"), "abcd", 3_000
    with Topic(path) as topic:
        topic.reader("r").close()
    running = [
        subprocess.Popen(
            [sys.executable, "-c", CONSUME, path, name, str(calls)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in names
    ]
    for one in running:
        assert one.stdout is not None
        assert one.stdout.readline() == "\n"
    for one in running:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    for one in running:
        one.communicate(timeout=120)
    turns = Path(path + ".turns").read_text()
    assert len(turns) == len(names) * calls
    # Until the first has had all its turns, all of them want the lock.
    contended = turns[: min(turns.rindex(name) for name in names)]
    assert min(contended.count(name) for name in names) >= calls / 3, {name: contended.count(name) for name in names}
