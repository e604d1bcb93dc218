"""``qewqew put -f FILE``: records of a file whose name, or --format, says what it is."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from commands import done, refused, run

from qewqew_core import Queue

CSV = b"id;shop\n1;eu\n2;\n"
ROWS = [b'{"id":"1","shop":"eu"}', b'{"id":"2","shop":null}']


def content(path: Path) -> list[bytes]:
    with Queue(path) as queue:
        return queue.get_many(100_000)


@pytest.mark.parametrize(
    ("name", "data"),
    [("x.csv", CSV), ("x.csv.gz", gzip.compress(CSV)), ("X.CSV", CSV.decode().encode("utf-16"))],
    ids=["csv", "gzip", "utf-16"],  # what is compressed has the time of its making in it
)
def test_the_rows_of_a_csv_are_put_and_it_is_told_how_they_were_read(tmp_path: Path, name: str, data: bytes) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    encoding = "utf-16" if name.isupper() else "utf-8"
    result = run("put", tmp_path / "q", "-f", file)
    assert (result.exit_code, result.stdout) == (0, "2 records put\n")
    assert result.stderr == f"qewqew: {file}: CSV in {encoding}, delimiter ';', columns 'id', 'shop'\n"
    assert content(tmp_path / "q") == ROWS


def test_formats_and_options_are_given_for_what_has_no_name(tmp_path: Path) -> None:
    arguments = ["put", tmp_path / "q", "--format", "csv", "--option", "names=id,shop", "--option", "delimiter=;"]
    assert done(*arguments, stdin=CSV) == b"3 records put\n"
    assert content(tmp_path / "q")[0] == b'{"id":"id","shop":"shop"}'


def test_the_values_of_a_json_array_are_put_as_written(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"a": 1.50},\n {"b": [1,\n 2]}]')
    assert json.loads(done("put", tmp_path / "q", "-f", tmp_path / "x.json", "--json"))["records"] == 2
    assert content(tmp_path / "q") == [b'{"a": 1.50}', b'{"b": [1,\n 2]}']


@pytest.mark.parametrize("arguments", [["--lines"], []])
def test_lines_are_put_as_they_are(tmp_path: Path, arguments: list[str]) -> None:
    file = tmp_path / ("x.csv" if arguments else "x.log")
    file.write_bytes(b"a;b\r\n\n c\n")
    assert done("put", tmp_path / "q", "-f", file, *arguments) == b"3 records put\n"
    assert content(tmp_path / "q") == [b"a;b\r", b"", b" c"]


def test_json_lines_are_read_as_the_stage_operator_reads_them(tmp_path: Path) -> None:
    for name, data in (
        ("a.ndjson", b'\xef\xbb\xbf{"id":1}\r\n\r\n{"id":2}\r\n'),
        ("b.jsonl", gzip.compress(b'{"id":1}\n{"id":2}')),
    ):
        (tmp_path / name).write_bytes(data)
        done("put", tmp_path / f"{name}.qew", "-f", tmp_path / name)
        assert content(tmp_path / f"{name}.qew") == [b'{"id":1}', b'{"id":2}']


def test_a_file_is_put_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n" + "1,2\n" * 3000 + "1\n")
    said = "line 3,002 has 1 fields, but the first line has 2"
    refused(1, "put", tmp_path / "q", "-f", tmp_path / "x.csv", match=said)
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--format", "xls"], "the format is 'xls'; it must be one of"),
        (["--format", "csv", "--option", "sep=;"], "no option of a file is called 'sep'"),
        (["--format", "csv", "--option", "delimiter"], "--option must be NAME=VALUE"),
        (["--format", "json", "--option", "delimiter=;"], "delimiter is for CSV"),
        (["--format", "csv", "--lines"], "cannot be combined with --lines"),
        (["--option", "delimiter=;"], "its name has no ending, which says no format"),
        (["--format", "csv", "one"], "from the arguments or from a file"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_made(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = run("put", tmp_path / "q", *arguments, stdin=CSV)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", "").split())
    assert list(tmp_path.iterdir()) == []


def test_a_record_of_many_megabytes_is_split_off_in_proportion_to_its_length(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x" * (40 << 20) + b"\nend")
    assert done("put", tmp_path / "t", "--topic", "-f", tmp_path / "x") == b"2 records put\n"
