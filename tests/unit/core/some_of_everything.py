"""Makes a queue and a topic with some of everything, closed or as a kill leaves them.

python some_of_everything.py DIRECTORY closed|killed
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import qewqew_core
from qewqew_core import Queue


def queue(path: Path) -> Queue:
    """40 records: 3 were taken, 5 acknowledged, 4 are leased, 4 dead, 4 returned, 20 wait."""
    made = Queue(path, chunk_size=300)
    made.put_many([b"record %02d " % number + b"x" * number for number in range(30)], key="first")
    for number in range(30, 40):
        made.put(b"record %02d " % number + b"x" * number)
    made.get_many(3)
    lease(made, "acknowledged", 5).ack()
    lease(made, "leased", 4)
    lease(made, "dead", 4).to_dead_letters("cannot be parsed")
    lease(made, "returned", 4).nack("the job failed")
    return made


def topic(path: Path) -> tuple[qewqew_core.Topic, qewqew_core.Reader, qewqew_core.Reader]:
    """40 messages, of which reader ``all`` has committed 3, reads 2 and leases 4; reader ``odd`` has committed 4 of its own."""
    made = qewqew_core.Topic(path, block_size=1000)
    every, odd = made.reader("all"), made.reader("odd", filter="odd")
    made.append_many([message(number) for number in range(30)], key="first")
    for number in range(30, 40):
        made.append_many([message(number)])
    every.commit(*every.read_many(3))
    lease(every, "leased", 4)
    every.read_many(2)
    odd.commit(*odd.read_many(4))
    return made, every, odd


def message(number: int) -> qewqew_core.Message:
    return qewqew_core.Message(b"message %02d " % number + b"x" * number, ("even", "odd")[number % 2])


def lease(source: object, key: str, records: int) -> qewqew_core.Batch:
    batch = source.lease(key, max_records=records)
    assert batch is not None
    return batch


def main(directory: Path, end: str) -> None:
    directory.mkdir()
    opened = [queue(directory / "queue"), *reversed(topic(directory / "topic"))]
    if end == "killed":
        os._exit(0)  # no close, as if by SIGKILL
    for each in opened:
        each.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
