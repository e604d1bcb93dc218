"""What is measured: works, each of which is done to a peer in a process of its own.

The records are made of random bytes, always the same thousand one after another, so that a later process knows what it must
read; each compares what it reads with what was put, while the clock stands.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import multiprocessing
import os
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.peers import BATCH, PEERS, Peer, PlainFile, QewQew, QewQewTopic, ZbusJava

SLICE = 25  # the clock is looked at after so many calls
THREADS = 8
FILL = 8  # times as long as anything else a queue may take to be filled …
FILL_RECORD = 5e-6  # … or so many seconds for each record, if that is longer


@dataclass(frozen=True)
class Case:
    """One process: the work, on records of ``size`` bytes, until there are ``records`` or ``limit`` seconds are over.

    A race ends when there are all of them: so many ``processes`` share them out.
    """

    work: str
    peer: str
    directory: str
    size: int
    records: int
    limit: float
    taken: int = 0  # by those before
    processes: int = 1


Sample = dict[str, Any]  # "seconds" for each of "records" records, or what the work says


class WrongRecords(Exception):
    """The peer gave back something else than what was put."""


def pool(size: int) -> list[bytes]:
    chosen = random.Random(size)  # noqa: S311 - the same in every process
    return [chosen.randbytes(size) for _ in range(BATCH)]


def scaled(records: int, size: int) -> int:
    """How many records of this size are measured, where there are so many of up to 1 KB: as many bytes, and whole batches."""
    return max(2 * BATCH, min(records, records * 1_000 // size) // BATCH * BATCH)


def fill_limit(case: Case) -> float:
    return max(case.limit * FILL, case.records * FILL_RECORD)


def put_until(case: Case, put: Callable[[list[bytes]], object], step: int, limit: float) -> tuple[float, int]:
    """(seconds, records)"""
    records = pool(case.size)
    parts = [records[at : at + step] for at in range(0, BATCH, step)]
    done, spent, clock = 0, 0.0, time.perf_counter
    while done < case.records and spent < limit:
        part = parts[done // step % len(parts)]
        began = clock()
        put(part)
        spent += clock() - began
        done += len(part)
    return spent, done


def get_until(case: Case, get: Callable[[int], list[bytes]], step: int, most: int, limit: float) -> tuple[float, int]:
    """(seconds, records), all of them what was put there."""
    records = pool(case.size) * 2
    done, spent, clock = 0, 0.0, time.perf_counter
    while done < most and spent < limit:
        wanted = min(step, most - done)
        began = clock()
        got = get(wanted)
        spent += clock() - began
        at = (case.taken + done) % BATCH
        if got != records[at : at + wanted]:
            raise WrongRecords(f"from record {case.taken + done:,} on: {len(got)} of {wanted}, or others than were put")
        done += wanted
    return spent, done


def open_peer(case: Case, sync: str) -> Peer:
    return PEERS[case.peer](case.directory, sync)


def close_synced(case: Case, peer: Peer) -> float:
    """Close it, and have on disk what it wrote; returns the seconds that took."""
    began = time.perf_counter()
    peer.close()
    sync_files(case.directory)
    took = time.perf_counter() - began
    peer.stop()
    return took


def sync_files(directory: str) -> None:
    for folder, _, files in os.walk(directory):
        for name in files:
            if name != "socket":
                fd = os.open(os.path.join(folder, name), os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)


def drain(case: Case, sync: str, count: int) -> None:
    """Read back what was put, as far as the time goes; if that is to the end, there must be no more."""
    peer = open_peer(case, sync)
    step, get = (BATCH, peer.get_many) if peer.batch_get else (SLICE, peer.get_each)
    _, done = get_until(case, get, step, count, case.limit)
    if done == count and peer.batch_get and peer.get_many(1):
        raise WrongRecords(f"more than the {count:,} records that were put")
    peer.close()
    peer.stop()


def putting(case: Case, sync: str, many: bool) -> Sample:
    peer = open_peer(case, sync)
    spent, done = put_until(case, peer.put_many if many else peer.put_each, BATCH if many else SLICE, case.limit)
    closing = close_synced(case, peer)
    drain(case, sync, done)
    return {"seconds": (spent + closing) / done, "closing": closing, "records": done}


def put(case: Case) -> Sample:
    return putting(case, "never", False)


def put_commit(case: Case) -> Sample:
    return putting(case, "commit", False)


def put_many_commit(case: Case) -> Sample:
    return putting(case, "commit", True)


def put_many(case: Case) -> Sample:
    """What it puts stays for those that come after it."""
    peer = open_peer(case, "never")
    spent, done = put_until(case, peer.put_many if peer.batch_put else peer.fill, BATCH, fill_limit(case))
    closing = close_synced(case, peer)
    return {"records": done} | ({"seconds": (spent + closing) / done, "closing": closing} if peer.batch_put else {})


def open_first(case: Case) -> Sample:
    began = time.perf_counter()
    peer = open_peer(case, "never")
    (first,) = peer.get_each(1)
    took = time.perf_counter() - began
    memory = peer.memory()
    if first != pool(case.size)[0]:
        raise WrongRecords("the first record is another than was put")
    peer.close()
    peer.stop()
    return {"seconds": took, "records": case.records, "taken": 1, "memory": memory}


def getting(case: Case, many: bool) -> Sample:
    peer = open_peer(case, "never")
    # One by one takes a quarter, so that there is something left for who comes next.
    get, step, share = (peer.get_many, BATCH, 1) if many else (peer.get_each, SLICE, 4)
    left = case.records - case.taken if peer.remembers else case.records
    if not peer.remembers:
        case = dataclasses.replace(case, taken=0)
    spent, done = get_until(case, get, step, max(1, left // share), case.limit)
    peer.close()
    peer.stop()
    return {"seconds": spent / done, "records": done, "taken": done}


def get(case: Case) -> Sample:
    return getting(case, False)


def get_many(case: Case) -> Sample:
    return getting(case, True)


def lease(case: Case) -> Sample:
    """Of all there is."""
    peer = open_peer(case, "commit")
    assert isinstance(peer, QewQew)
    began = time.perf_counter()
    batch = peer.queue.lease("benchmark")
    took = time.perf_counter() - began
    if batch is None or batch.records != case.records:
        raise WrongRecords("the batch has not all records")
    peer.close()
    return {"seconds": took, "records": case.records, "bytes": batch.bytes}


def filter_all(case: Case) -> Sample:
    """A reader whose filter all messages match."""
    return filtering(case, "order.*.eu", case.records)


def filter_none(case: Case) -> Sample:
    """A reader whose filter no message matches."""
    return filtering(case, "order.*.us", 0)


def filtering(case: Case, filter: str, matching: int) -> Sample:
    peer = open_peer(case, "never")
    assert isinstance(peer, QewQewTopic)
    peer.read_with(filter.replace("*", "any"), filter)
    spent, _ = get_until(case, peer.read_many, BATCH, matching, sys.maxsize)
    began = time.perf_counter()
    if peer.read_many(BATCH):
        raise WrongRecords("more messages than match")
    spent += time.perf_counter() - began
    peer.close()
    return {"seconds": spent / case.records, "records": case.records}


def threads_commit(case: Case) -> Sample:
    """Eight threads put one by one."""
    peer = open_peer(case, "commit")
    others = [peer if peer.shared else open_peer(case, "commit") for _ in range(THREADS - 1)]
    part = dataclasses.replace(case, records=case.records // THREADS)
    with ThreadPoolExecutor(THREADS) as threads:
        began = time.perf_counter()
        counts = [done for _, done in threads.map(lambda one: put_until(part, one.put_each, SLICE, case.limit), [peer, *others])]
        spent = time.perf_counter() - began
    for other in others if not peer.shared else ():
        other.close()
    closing = close_synced(case, peer)
    check_any_order(case, sum(counts))
    return {"seconds": (spent + closing) / sum(counts), "closing": closing, "records": sum(counts)}


def race_whole(case: Case) -> Sample:
    """Each process stages its records, and commits once."""
    return race(case, case.records // case.processes)


def race_by_1000(case: Case) -> Sample:
    """Each process commits every thousand records."""
    return race(case, BATCH)


def race_tasks(case: Case) -> Sample:
    """As `race_whole`, for many more processes than there are processors."""
    return race_whole(case)


def race(case: Case, together: int) -> Sample:
    """All processes stage into one queue at once, each with a commit for so many records, until the last has finished."""
    host = open_peer(case, "commit")  # makes it; a server stays
    if not hasattr(host, "server"):
        host.close()
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(case.processes), context.SimpleQueue()
    running = [context.Process(target=racer, args=(case, together, barrier, results)) for _ in range(case.processes)]
    for process in running:
        process.start()
    told: list[Racer] = []
    for process in running:
        process.join()
        if process.exitcode:
            raise WrongRecords("a process has failed")
        told.append(results.get())
    failed = {racer.failed for racer in told if racer.failed and not racer.is_locked_out}
    if failed:
        raise WrongRecords(f"of its processes: {', '.join(sorted(failed))}")
    locked_out = sum(racer.is_locked_out for racer in told)
    count = case.records // case.processes * (case.processes - locked_out)
    peer = open_peer(case, "commit")
    found = peer.count(case.size)
    peer.close()
    if found != count:
        raise WrongRecords(f"{found:,} records instead of {count:,}")
    if peer.remembers:
        check_any_order(dataclasses.replace(case, limit=case.limit / FILL), count)  # briefly: there are as many as there must be
    host.stop()
    whole = max(racer.ended for racer in told) - min(racer.began for racer in told)
    sample = {"seconds": whole / case.records, "whole": whole, "records": count, "processes": case.processes}
    return sample | {"longest": max(racer.longest for racer in told), "locked_out": locked_out}


@dataclass(frozen=True)
class Racer:
    """What one process tells, by the clock that all have: of its commits how long the longest took."""

    began: float = math.inf
    ended: float = 0.0
    longest: float = 0.0
    failed: str = ""
    is_locked_out: bool = False


def racer(case: Case, together: int, barrier: Any, results: Any) -> None:
    batches = [pool(case.size)] * (together // BATCH)
    began, longest, failed = math.inf, 0.0, None
    try:
        with PEERS[case.peer].staging(case.directory) as commit:
            barrier.wait()
            began = now = time.perf_counter()
            for _ in range(case.records // case.processes // together):
                commit(batches)
                before, now = now, time.perf_counter()
                longest = max(longest, now - before)
    except Exception as error:
        if began == math.inf:
            barrier.abort()  # nobody is to wait for this one
        failed = error
    why = f"{type(failed).__name__}: {failed}"[:200] if failed else ""
    results.put(Racer(began, time.perf_counter(), longest, why, type(failed).__name__ == "Locked"))


def check_any_order(case: Case, count: int) -> None:
    """That there are so many records, as far as the time goes, and none that was not put, by its checksum."""
    peer = open_peer(case, "never")
    get, step = (peer.get_many, BATCH) if peer.batch_get else (peer.get_each, SLICE)
    done, began = 0, time.perf_counter()
    allowed = {zlib.crc32(record) for record in pool(case.size)}
    while done < count and time.perf_counter() - began < case.limit * FILL:
        got = get(min(step, count - done))
        if not got or not allowed.issuperset(map(zlib.crc32, got)):
            raise WrongRecords(f"after {done:,} of {count:,} records: {len(got)} more, or others than were put")
        done += len(got)
    peer.close()
    peer.stop()


def in_java(case: Case) -> Sample:
    """The same work, of `ZbusJava`; it tells the same."""
    program = os.path.join(os.path.dirname(__file__), "ZbusWork.java")
    command = ["java", "-cp", ZbusJava.jar, program, case.work, case.directory, str(case.size), str(case.records)]
    told = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout  # noqa: S603
    sample: Sample = json.loads(told)
    if case.work == "put_many":
        began = time.perf_counter()
        sync_files(os.path.join(case.directory, "queue"))
        sample["closing"] = time.perf_counter() - began
        sample["seconds"] += sample["closing"] / case.records
    return sample


def able(peer: type[Peer], work: str) -> bool:
    """Whether there is anything to measure, or to prepare for what comes after it."""
    if peer is ZbusJava:
        return work in ("put_many", "get_many", "filter_all", "filter_none")
    if work.startswith("race_"):
        return peer.races and (work != "race_tasks" or peer in (PlainFile, QewQew))
    if work == "lease":
        return peer is QewQew
    if work.startswith("filter_"):
        return peer is QewQewTopic
    if work == "put":
        return not peer.always
    if work == "get_many":
        return peer.batch_get
    if not work.endswith("_commit"):
        return True
    return (
        peer.commit is not None
        and (peer.batch_put or work != "put_many_commit")
        and (peer is not PlainFile or work != "threads_commit")
    )


WORKS: dict[str, Callable[[Case], Sample]] = {
    one.__name__: one
    for one in (
        put,
        put_many,
        open_first,
        get,
        get_many,
        lease,
        filter_all,
        filter_none,
        put_commit,
        put_many_commit,
        threads_commit,
        race_whole,
        race_by_1000,
        race_tasks,
    )
}


def child(case: Case, answer: Connection) -> None:
    """What a process does, in a group of its own with all that it starts."""
    os.setsid()
    os.chdir(case.directory)
    try:
        if package := PEERS[case.peer].package:
            importlib.import_module(package)
        sample = in_java(case) if PEERS[case.peer] is ZbusJava else WORKS[case.work](case)
    except Exception as error:
        sample = {"failed": f"{type(error).__name__}: {error}"}
    answer.send(sample)
