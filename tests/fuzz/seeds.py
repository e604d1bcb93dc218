"""Inputs to begin from, made by real queues: seeds.py DIRECTORY writes DIRECTORY/TARGET/NAME for each target.

To be run again when a format changes; then ``minimize.py TARGET DIRECTORY/TARGET`` takes what covers more into the corpus.
"""

from __future__ import annotations

import contextlib
import json
import random
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fuzz_targets

from qewqew_core import Empty, Queue, Topic
from qewqew_core.batch import manifest
from qewqew_core.formats.chunk import frame
from qewqew_core.topic.reader import Reader

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "core"))
import test_java_states as states


def logs() -> Iterator[bytes]:
    """Logs of queues in use and closed, after random operations of every kind."""
    for seed in range(200):
        luck = random.Random(seed)
        yield b"s" + luck.randbytes(4 * luck.randrange(1, 12))
        puts = b"s" + bytes([3, 1, 63, 0, 0, 1, 2, 0, 3, 2, 63, 0, 0, 2, 2, 0, 6, 0, 0, 0])  # two chunks of two records
        yield puts + b"".join(bytes([5, luck.randrange(256), luck.randrange(256), luck.randrange(256)]) for _ in range(4))
    for seed in range(40):
        luck = random.Random(seed)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "q")
            options = {"chunk_size": luck.choice([16, 64, 400]), "max_attempts": 2, "retention_bytes": luck.choice([0, 30])}
            for session in range(2):
                with Queue(path, **options) as q:
                    for step in range(luck.randrange(2, 14)):
                        operate(q, luck, f"{session} {step}")
                        if luck.random() < 0.2:
                            yield path.with_name("q.wal").read_bytes().rstrip(b"\0")
                    yield path.with_name("q.wal").read_bytes().rstrip(b"\0")
                if path.with_name("q.wal").exists():
                    yield path.with_name("q.wal").read_bytes()


def operate(q: Queue, luck: random.Random, key: str) -> None:
    pick, count = luck.randrange(11), luck.randrange(1, 6)
    batches = [batch for batch in q.batches() if batch.state == "leased"] or [None]
    batch = luck.choice(batches)
    if pick < 3 or not q:
        q.put_many([b"%d" % luck.randrange(1000)] * count, key=luck.choice([None, key]))
    elif pick == 3:
        q.get_many(count)
    elif pick == 4:
        q.lease(key, max_records=luck.choice([None, count]))
    elif pick == 5 and batch:
        getattr(batch, luck.choice(["ack", "nack", "put_back", "to_dead_letters"]))()
    elif pick == 6 and q.dead():
        getattr(q.dead()[0], luck.choice(["return_to_queue", "drop"]))()
    elif pick == 7:
        q.clear()
    elif pick > 8:  # taken behind what another session holds
        with q.session() as held, q.session() as other:
            held.get_many(count)
            other.get_many(count)
            other.put_many([b"put"] * count)
            other.commit(luck.choice([None, key]))
            if luck.random() < 0.5:
                held.rollback()
    else:
        q.get()


def chains() -> Iterator[bytes]:
    for state in states.CRASHES + states.SAFE + states.DAMAGED_BUT_CLEAR + states.DAMAGED:
        yield fuzz_targets.pack_chain(state.size, state.header, state.chunks | state.orphans)


def manifests() -> Iterator[bytes]:
    good = fuzz_targets.good_manifest()
    yield json.dumps(good).encode()
    yield manifest.parse(good, "x").to_json()
    yield from (b"\1", b"\0", b"[]", b"", b"{")
    yield from (bytes([fixed, place, value]) for fixed in (0, 1) for place in range(40) for value in range(40))


def topic_logs() -> Iterator[bytes]:
    """Scripts of every kind of operation, and logs of topics in use and closed."""
    for seed in range(300):
        luck = random.Random(seed)
        yield b"s" + luck.randbytes(4 * luck.randrange(1, 12))
    yield from topics_in_use("*.wal")


def reader_logs() -> Iterator[bytes]:
    for seed in range(500):
        luck = random.Random(seed)
        yield b"s" + luck.randbytes(4 * luck.randrange(1, 12))
        yield b"s" + bytes(n for _ in range(luck.randrange(1, 12)) for n in (luck.randrange(12), *luck.randbytes(3)))
    yield from topics_in_use("state/*.wal")


def topics_in_use(pattern: str) -> Iterator[bytes]:
    for seed in range(12):
        luck = random.Random(seed)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "t")
            for round in range(2):
                with Topic(path, block_size=500, delete_committed=True, max_attempts=2) as t, t.reader("r", window=8) as r:
                    for step in range(luck.randrange(2, 9)):
                        operate_topic(t, r, luck, f"{round} {step}")
                    yield from (file.read_bytes().rstrip(b"\0") for file in path.glob(pattern))
                yield from (file.read_bytes() for file in path.glob(pattern))


def operate_topic(t: Topic, r: Reader, luck: random.Random, key: str) -> None:
    pick = luck.randrange(8)
    batches = [batch for batch in r.batches() if batch.state == "leased"]
    if pick < 3:
        t.append_many([b"%d" % luck.randrange(1000)] * luck.randrange(4), key=luck.choice([None, key]))
    elif pick == 3:
        r.read_many(luck.randrange(1, 4))
        r.commit()
    elif pick == 4 and batches:
        getattr(luck.choice(batches), luck.choice(["ack", "nack", "put_back", "to_dead_letters"]))()
    elif pick == 5:
        r.lease(key, max_records=luck.randrange(1, 4))
    elif pick == 6:
        r.set_filter(luck.choice([None, "a.*"]))
    else:
        with contextlib.suppress(Empty), t.session() as session:
            session.append(b"s")
            session.read(r)


def topics() -> Iterator[bytes]:
    """A few messages in a few blocks; and one, two or five things done to that."""
    for seed in range(1200):
        luck = random.Random(seed)
        good = [bytes([8 * luck.randrange(30), 40, 3, 0]) for _ in range(luck.randrange(4))]
        steps = [
            luck.choice([b"\0" + luck.randbytes(2) + b"\0", b"\1\0\0\0", b"\5" + luck.randbytes(2) + b"\2"]) for _ in range(6)
        ]
        rest = [luck.randbytes(4) for _ in range(luck.choice([0, 1, 2, 5]))]
        yield luck.randbytes(1) + b"".join([*(one if seed % 2 else b"" for one in good), *steps, *rest])


def splits() -> Iterator[bytes]:
    for limit in (0, 1, 3):
        for records in ([], [b""], [b"a", b"bc", b""], [b"x" * 300] * 2):
            frames = bytes([limit]) + frame(records)
            yield from (frames, frames[:-1], frames + b"\0", frames + b"\0\5a")


def requests() -> Iterator[bytes]:
    """Requests as stages write them, under a key or none, on our terms or others; and with one thing changed."""
    for records in ([], [[b"a"]], [[b"a", b""], [b"x" * 40]], [[b"y"] * 9], [[b"too large" * 9]]):
        for key, terms in ((b"k" * 16, (64, 7)), (bytes(16), (64, 7)), (b"stored already..", (64, 7)), (bytes(16), (64, 8))):
            runs = [(run, frame(run)) for run in records]
            head = struct.pack(">8sIQ16sI", b"QEWQPUT1", *terms, key, len(runs))
            sizes = b"".join(struct.pack(">II", len(run), len(frames)) for run, frames in runs)
            good = head + sizes + b"".join(frames for _, frames in runs)
            yield from (bytes([flags]) + good for flags in range(4))
            yield from (b"\1" + bad for bad in (good[:-1], good + b"\0", good[:36] + b"\0\0\0\7" + good[40:]))
            yield from (b"\1" + good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(0, len(good), 3))


if __name__ == "__main__":
    fuzz_targets.use_private_directory()
    every = {"log": logs(), "chain": chains(), "manifest": manifests(), "split": splits()}
    every |= {"topic_log": topic_logs(), "reader_log": reader_logs(), "topic": topics(), "request": requests()}
    for name, seeds in every.items():
        home = Path(sys.argv[1], name)
        home.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(dict.fromkeys(seeds)):
            (home / f"{number:03}").write_bytes(data)
