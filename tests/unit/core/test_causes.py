"""Which reasons belong together."""

from __future__ import annotations

import pytest

from qewqew_core import Queue
from qewqew_core.batch.causes import LONGEST, cause_of


@pytest.mark.parametrize(
    ("cause", "reasons"),
    [
        ("Path … already exists", ["Path /lake/flights already exists", "Path s3a://lake/a=1/b already exists"]),
        ("Path '…' is there", ["Path '/lake/day=2026-01-01/x' is there", "Path 'file:/lake/y' is there"]),
        ("no table", ["attempt 1 of 5: no table", "attempt 5 of 5: no table", "no table"]),
        ("the batch orders-… has … bytes", ["the batch orders-38b4c6d819b8ed1d has 1,234 bytes"]),
        ("run manual__…T…+…", ["run manual__2026-01-01T00:00:00+00:00", "run manual__2027-12-31T23:59:59.123+01:00"]),
        ("object … at … of …", [f"object 123e4567-e89b-12d3-a456-42661417400{n} at 0x7f{n}a of {n}" for n in range(3)]),
        ("I/O error on …", ["I/O error on /dev/sda", "I/O error on ~/disk", "I/O error on ../disk"]),
        ("failed at line …", ["failed\n  at line 5", "failed at\tline 77 "]),
        (
            "Py4JJavaError: calling o….save took …s",
            ["Py4JJavaError: calling o1.save took 5s", "Py4JJavaError: calling o22.save took 66s"],
        ),
        ("", ["", " "]),
    ],
)
def test_reasons_that_differ_in_paths_ids_and_numbers_have_one_cause(cause: str, reasons: list[str]) -> None:
    assert {cause_of(reason) for reason in reasons} == {cause}


def test_other_words_are_other_causes() -> None:
    reasons = ["the cluster was gone", "the cluster was full", "cannot decode utf8", "cannot decode latin1", "deadbeef is a word"]
    reasons += ["exit code 1", "exit code 137", "HTTP 404", "HTTP 503", "HTTP/1.1 503", "status code: 429", "Errno 28", "Errno 5"]
    reasons += ["failed (SQLSTATE: 42K04)", "failed (SQLSTATE: 42S02)"]
    assert len(set(map(cause_of, reasons))) == len(reasons)


@pytest.mark.parametrize("reason", ["/" * 1000, "a" * 1000, "1:" * 500, "a.b-" * 250, "0x" * 500, "…" * 1000, "f1" * 500])
def test_any_reason_has_a_cause_that_is_not_too_long(reason: str) -> None:
    assert len(cause_of(reason)) <= LONGEST


def test_the_attempt_that_a_queue_writes_before_a_reason_is_known(tmp_path) -> None:
    with Queue(tmp_path / "q", max_attempts=1) as queue:
        queue.put(b"x")
        queue.lease("run").nack("no table")
        (batch,) = queue.dead()
    assert batch.reason != "no table"
    assert cause_of(batch.reason) == "no table"
