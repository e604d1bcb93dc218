"""Stages in an object store: moto's S3 server, and before it a proxy that fails, cuts off, or lets others go first."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from object_store import CREDENTIALS, LOST, Proxy, proxied

from qewqew_core import BadArgument, BadPath, InDoubt, Stage, StoreError, StoreStage
from qewqew_core.batch import published, segments
from qewqew_core.batch.store import store_of
from qewqew_core.tools.preflight import of_url

ROWS = [b"%d" % number for number in range(10)]
CHANGED = [b"new", *ROWS]


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with proxied("lake") as server:
        yield server


@pytest.fixture
def options(proxy, monkeypatch) -> dict[str, Any]:
    """Of the store. The client itself does not try again: what is tested is what we do."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return {"endpoint_url": proxy.url, "config_kwargs": {"retries": {"max_attempts": 0}}}


_numbers = count()


def new_place() -> str:
    return f"s3://lake/staged/{next(_numbers)}/orders"


def drained(place: str, options: dict[str, Any]) -> list[bytes]:
    rows = []
    for body in published.load(place, published.complete(place, options), options):
        store = store_of(published.place(place, body.id), options)
        rows += [row for each in body.segments for some in segments.read_records(store, body, each) for row in some]
    return rows


def staged(place: str, records: list[bytes], options: dict[str, Any], patience: float = 60.0) -> tuple[int, int]:
    with Stage(place, options=options, lock_timeout=patience) as stage:
        stage.put_many(records)
        return stage.commit("run 1"), stage.stored


def requests(proxy: Proxy) -> list[str]:
    return [request.partition(" ")[0] for request in proxy.seen]


def test_a_stage_takes_two_puts_and_one_head(proxy, options):
    place = new_place()
    staged(place, [], options)  # the first use tries the condition
    with Stage(place, options=options) as stage:
        stage.put_many(ROWS)
        proxy.reset()
        assert stage.commit("run 2") == 10
        assert sorted(requests(proxy)) == ["HEAD", "PUT", "PUT"]
    proxy.reset()
    assert staged(place, CHANGED, options) == (0, 0)
    assert sorted(requests(proxy)) == ["GET", "HEAD", "PUT", "PUT"]
    assert drained(place, options) == ROWS


def test_a_segment_of_many_megabytes_is_sent_in_parts(proxy, options):
    records = [b"%06d" % number * 1000 for number in range(3000)]
    place = new_place()
    proxy.reset()
    assert staged(place, records, options) == (3000, 3000)
    assert "POST" in requests(proxy)
    assert drained(place, options) == records


@pytest.mark.quick("whatever fails between a stage and an object store, each record is there once")
def test_each_request_may_fail_be_refused_or_lose_its_answer(proxy, options, every):
    cases = [
        (at, answer, stored, patience)
        for at in range(1, 8)  # a first stage: HEAD and a listing, three PUTs of the trial, two of the stage
        for answer, stored in ((500, False), (500, True), (LOST, False), (LOST, True), (409, False), (429, False))
        for patience in (0.0, 60.0)
    ]
    said = []
    for at, answer, stored, patience in every(cases, quick=28, full=7):
        place = new_place()
        proxy.reset(at, answer, stored)
        try:
            assert staged(place, ROWS, options, patience) == (10, 10), (at, answer, stored)
        except InDoubt:
            assert (at, patience) == (7, 0)
        except StoreError as error:
            said.append((at < 7, patience, error.what.endswith("Nothing was stored")))
        assert len(proxy.seen) >= at, "there are fewer requests than this test knows"
        proxy.reset()
        count, _ = staged(place, CHANGED, options)  # the next pod, whose source has changed
        rows = drained(place, options)
        assert rows in (ROWS, CHANGED), (at, answer, stored, patience)
        assert count == len(rows)
    assert set(said) <= {(True, 0.0, True)}


def test_another_attempt_may_overtake_at_each_request(proxy, options, every):
    for at in every(range(1, 8), quick=7):
        place, other = new_place(), []
        proxy.reset(at, act=lambda place=place, other=other: (proxy.reset(), other.append(staged(place, CHANGED, options))))
        assert staged(place, ROWS, options) == (11, 0)
        assert other == [(11, 11)]
        assert drained(place, options) == CHANGED


def test_a_refusal_has_a_name_and_nothing_is_stored(proxy, options):
    for at in (1, 3, 6, 7):
        place = new_place()
        proxy.reset(at, 403)
        with pytest.raises(BadPath, match=r"no permission .*Nothing was stored"):
            staged(place, ROWS, options)
        proxy.reset()
        assert published.complete(place, options) == []
    with pytest.raises(BadPath, match="make the bucket first"):
        staged("s3://nobody/orders", ROWS, options)


def test_a_place_is_tried_before_the_first_task(proxy, options):
    place = new_place()
    proxy.reset()
    with StoreStage(place, options=options) as stage:
        stage.check()
    assert published.complete(place, options) == []
    for at in range(1, 8):  # HEAD and a listing, two PUTs of the trial, two of the file that says so, and there is no more
        proxy.reset(at, 403)
        with StoreStage(new_place(), options=options) as stage:
            if at > 6:
                stage.check()
                break
            with pytest.raises(BadPath, match=r"no permission .* needs the right to write there, to read and to list"):
                stage.check()
    proxy.reset(2, 403)  # a place that somebody has tried before: the right to write may be gone
    with StoreStage(place, options=options) as stage, pytest.raises(BadPath, match="no permission"):
        stage.check()
    proxy.reset()
    (wrong,) = of_url("s3://nobody/orders", options)
    assert not wrong.ok
    assert "make the bucket first" in wrong.text


def test_a_server_that_ignores_the_condition_is_refused(proxy, options, monkeypatch):
    real = http.client.HTTPConnection.request

    def ignoring(self: Any, method: str, url: str, body: Any = None, headers: Any = None, **more: Any) -> None:
        real(self, method, url, body, {name: value for name, value in (headers or {}).items() if name != "If-None-Match"}, **more)

    monkeypatch.setattr(http.client.HTTPConnection, "request", ignoring)
    place = new_place()
    with pytest.raises(BadArgument, match="created a file twice"):
        staged(place, ROWS, options)
    assert published.complete(place, options) == []
