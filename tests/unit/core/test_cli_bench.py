"""``qewqew bench``."""

from __future__ import annotations

import json

from commands import done


def test_each_work_is_measured_beside_a_plain_file_and_nothing_is_left(tmp_path):
    found = json.loads(done("bench", tmp_path, "--seconds", "0.02", "--size", 300, "--json"))
    works = [("put", 1, "commit"), ("put", 1000, "commit"), ("put", 1, "never"), ("put", 1000, "never"), ("get", 1000, "never")]
    assert [(one["work"], one["records"], one["sync"]) for one in found] == works
    for one in found:
        assert one["size"] == 300
        assert one["ratio"] == one["plain_per_second"] / one["per_second"] > 0
    assert not list(tmp_path.iterdir())


def test_the_largest_records_are_measured_too(tmp_path):
    done("bench", tmp_path, "--seconds", "0.02", "--size", 65535)


def test_the_table_has_a_line_for_each_work(tmp_path):
    head, *lines = done("bench", tmp_path, "--seconds", "0.02").decode().splitlines()
    assert head.split()[:3] == ["work", "records", "sync"]
    assert [line.split()[:3] for line in lines[:2]] == [["put", "1", "commit"], ["put", "1,000", "commit"]]
    assert len(lines) == 5
