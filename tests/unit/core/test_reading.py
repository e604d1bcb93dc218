"""`records_of`: the records of files as people have them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import sys
import tracemalloc
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from qewqew_core import BadArgument, BadRecord
from qewqew_core.tools.reading import FORMATS, Reading, records_of
from qewqew_core.tools.rows import encode, plain, rows_of_arrow

ROWS = [{"id": "1", "shop": "eu"}, {"id": "2", "shop": "us"}]
PACKERS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def read(data: bytes, name: str, **options: Any) -> list[Any]:
    return told(data, name, **options)[0]


def told(data: bytes, name: str, **options: Any) -> tuple[list[Any], list[str]]:
    said: list[str] = []
    return list(records_of(io.BytesIO(data), name, Reading.of(options), said.append)), said


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("packing", PACKERS)
def test_lines_end_as_they_like_in_any_marked_encoding_and_packing(end: str, encoding: str, packing: str) -> None:
    data = PACKERS[packing](f'{{"a":"ü"}}{end}{end}{{"a":2}}'.encode(encoding))
    found, said = told(data, f"x.jsonl{packing}")
    assert found == ['{"a":"ü"}'.encode(), b'{"a":2}']
    assert said == ["1 blank lines were left out"]


@pytest.mark.parametrize("delimiter", ",;\t|")
@pytest.mark.parametrize("packing", PACKERS)
def test_the_delimiter_of_csv_is_found_and_told(delimiter: str, packing: str) -> None:
    text = "\n".join(delimiter.join(row) for row in [["id", "shop"], *(row.values() for row in ROWS)])
    found, said = told(PACKERS[packing](text.encode()), f"orders.csv{packing}")
    assert found == ROWS
    assert said == [f"CSV in utf-8, delimiter {delimiter!r}, columns 'id', 'shop'"]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("a;b\n1,5;2,5\n1,25;3\n", [{"a": "1,5", "b": "2,5"}, {"a": "1,25", "b": "3"}]),  # commas in the values
        ('a,b\n"x,y",1\n', [{"a": "x,y", "b": "1"}]),
        ('a,b\n"x\ny",1\n', [{"a": "x\ny", "b": "1"}]),
        ("a\n1\n2\n", [{"a": "1"}, {"a": "2"}]),
        ("a,b\n1,\n", [{"a": "1", "b": None}]),
        ("a,b\n", []),
        ("sep=;\r\na;b\r\n1,5;2\r\n", [{"a": "1,5", "b": "2"}]),  # as Excel has it
        ('"sep=|"\na|b\n1,5|2\n', [{"a": "1,5", "b": "2"}]),
        ("\n\na,b\n1,2\n", [{"a": "1", "b": "2"}]),
        (f"a;b\n{'x' * 200_000};1\n", [{"a": "x" * 200_000, "b": "1"}]),
        ("", []),
    ],
)
def test_csv_of_many_kinds(text: str, rows: list[Any]) -> None:
    assert read(text.encode(), "x.csv") == rows


def test_a_long_quoted_text_at_the_end_of_the_sample_hides_no_delimiter() -> None:
    lines = ["a;b", *(f"{number};x" for number in range(17)), '17;"x', *(f"line {number}" for number in range(9)), 'end"']
    found = read("\n".join(lines).encode(), "x.csv")
    assert len(found) == 18
    assert found[-1]["b"].startswith("x\nline 0")


def test_options_of_csv() -> None:
    given = "#1|'a|b'|-|1.234,5|x\n#2|'c'|d|7|1.234\n".encode("latin-1")
    names = ("id", "text", "kind", "price", "version")
    options = {"delimiter": "|", "quote": "'", "names": ",".join(names), "null": "-", "decimal_comma": ["price"]}
    assert read(given, "x.txt", format="csv", encoding="latin-1", **options) == [
        dict(zip(names, ("#1", "a|b", None, "1234.5", "x"), strict=True)),
        dict(zip(names, ("#2", "c", "d", "7", "1.234"), strict=True)),
    ]


def test_only_numbers_of_the_named_columns_lose_their_comma() -> None:
    values = ["1.234.567,89", "-1,5", "+0,25", "1 234,5", "12", "192.168.1", "24.11.2026", "n/a", "1,2,3", "0,1"]
    want = ["1234567.89", "-1.5", "+0.25", "1234.5", "12", "192.168.1", "24.11.2026", "n/a", "1,2,3", "0.1"]
    text = "a;b\n" + "".join(f"{value};{value}\n" for value in values)
    assert read(text.encode(), "x.csv", decimal_comma="a") == [
        {"a": number, "b": value} for number, value in zip(want, values, strict=True)
    ]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('[{"a": 1.50}, 2,\n "x", null, [1], {}]', ['{"a": 1.50}', "2", '"x"', "null", "[1]", "{}"]),
        ('{"a": 1}\n{"a": 2}\n', ['{"a": 1}', '{"a": 2}']),
        ('{"a": 1}{"a": 2} 3 4', ['{"a": 1}', '{"a": 2}', "3", "4"]),
        ('{\n  "a": [\n    1\n  ]\n}\n', ['{\n  "a": [\n    1\n  ]\n}']),
        ("[]", []),
        (" \n", []),
        ("", []),
        ("12345678901234567890.1234567890e5", ["12345678901234567890.1234567890e5"]),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_json_is_an_array_or_values_one_after_the_other_each_as_written(text: str, values: list[str], encoding: str) -> None:
    assert read(text.encode(encoding), "x.json") == [value.encode() for value in values]


def test_json_is_read_in_bounded_memory_wherever_a_block_ends() -> None:
    values = [json.dumps({"n": number, "text": "ü" * (number % 700)}) for number in range(9_000)]
    whole = f"[{','.join(values)}]".encode()
    assert len(whole) > 3 << 20
    read_bytes = 0

    class Counted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            nonlocal read_bytes
            data = super().read(size)
            read_bytes += len(data)
            return data

    found = records_of(Counted(whole), "x.json", Reading(), lambda text: None)
    assert next(found) == values[0].encode()
    assert read_bytes < len(whole) / 2
    assert list(found) == [value.encode() for value in values[1:]]


def test_a_value_of_megabytes_is_read_whole() -> None:
    long = json.dumps({"text": "x" * (5 << 20), "n": list(range(100_000))}).encode()
    assert read(b"[" + long + b", 1]", "x.json") == [long, b"1"]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("x.csv", b"a,b\n1,2\n1\n", "line 3 has 1 fields, but the first line has 2"),
        ("x.csv", b'a,b\n1,2\n"1\n', "near line 3: not CSV: unexpected end of data"),
        ("x.csv", b"a,a\n", "a column twice"),
        ("x.csv", b"id;shop\n1;eu\n2;us;x\n", "line 3 has 3 fields, but the first line has 2 (delimiter ';')"),
        ("x.csv", b"id;shop\n1;eu\n2\n", "line 3 has 1 fields, but the first line has 2 (delimiter ';')"),
        ("x.csv", b"a,b\n1,2\n1,\xff\n", "this is not utf-8"),
        ("x.json", b'[1,\n2,\n{"a": tru}]', "near line 3: not JSON: Expecting value"),
        ("x.json", b"[1,\n2\n3]", "near line 3: not JSON: after a value of the array comes '3', not a comma"),
        ("x.json", b"[1,\n2,\n]", "near line 3: not JSON: a value must follow the comma"),
        ("x.json", b"[1,\n2\n", "the array has no end"),
        ("x.json", b'[1,\n"abc', "near line 2: not JSON: Unterminated string"),
        ("x.json", b"[1] 2", "something follows the array"),
        ("x.json", b"[NaN]", "NaN is not a value"),
        ("x.json", b"[" * 100_000, "not JSON"),
        ("x.json", b'["\xff"]', "this is not utf-8"),
        ("x.jsonl.gz", gzip.compress(b"a\nb\n")[:-9], "the compressed file is damaged, or a part of it is missing"),
        ("x.jsonl.bz2", bz2.compress(b"a\nb\n")[:-9], "the compressed file is damaged, or a part of it is missing"),
        ("x.jsonl.xz", lzma.compress(b"a\nb\n")[:-9], "the compressed file is damaged, or a part of it is missing"),
        ("x.csv.gz", gzip.compress(b"a\n1\n")[:12] + b"?" * 9, "the compressed file is damaged, or a part of it is missing"),
        ("x.parquet", b"PAR1 no", "not Parquet that can be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "data",  # what is compressed has the time of its making in it
)
def test_what_is_no_such_file_is_refused_with_its_name_and_line(name: str, data: bytes, said: str) -> None:
    with pytest.raises(BadRecord, match="Nothing was stored") as caught:
        read(data, name)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("x", {}, "its name has no ending, which says no format; give one of csv"),
        ("x.xlsx", {}, "its name ends with '.xlsx', which says no format"),
        ("x.csv", {"format": "excel"}, "the format is 'excel'; it must be one of csv"),
        ("x.csv", {"encoding": "klingon"}, "no encoding is called 'klingon'"),
        ("x.csv", {"delimiter": "||"}, "the delimiter must be one character"),
        ("x.csv", {"delimiter": "\n"}, "the delimiter must be one character"),
        ("x.csv", {"encoding": "hex"}, "no encoding is called 'hex'"),
        ("x.csv", {"delimiter": 1}, "the option delimiter must be a text"),
        ("x.csv", {"names": [1]}, "the option names must be names of columns"),
        ("x.csv", {"names": "a,a"}, "two of the names of the columns are the same"),
        ("x.csv", {"decimal_comma": "z"}, "there is no column 'z'"),
        ("x.csv", {"sep": ";"}, "no option of a file is called 'sep'; these are: decimal_comma, delimiter"),
        ("x.jsonl", {"delimiter": ";"}, "delimiter is for CSV, but the format is jsonl"),
        ("x.parquet", {"encoding": "latin-1"}, "encoding is for texts, but the format is parquet"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadArgument) as caught:
        read(b"a,b\n1,2\n", name, **options)
    assert said in str(caught.value)


VALUES: dict[str, list[Any]] = {
    "id": [1, 2, None],
    "price": [Decimal("1.10"), None, Decimal("-0.01")],
    "ratio": [0.5, float("nan"), float("-inf")],
    "day": [date(2026, 11, 24), None, date(1, 1, 1)],
    "at": [datetime(2026, 11, 24, 10, 0, 0, 123456), None, datetime(1970, 1, 1)],
    "raw": [b"\xff", None, b""],
    "tags": [["a", None], [], None],
    "shop": [{"name": "eu", "open": True}, {"name": None, "open": None}, None],
}
PLAIN = {
    **VALUES,
    "price": ["1.10", None, "-0.01"],
    "ratio": [0.5, "NaN", "-Infinity"],
    "day": ["2026-11-24", None, "0001-01-01"],
    "at": ["2026-11-24T10:00:00.123456", None, "1970-01-01T00:00:00"],
    "raw": ["/w==", None, ""],
}
PLAIN_ROWS = [dict(zip(PLAIN, row, strict=True)) for row in zip(*PLAIN.values(), strict=True)]


@pytest.mark.parametrize("packing", ["", ".gz"])
def test_rows_of_parquet_have_values_that_json_has(tmp_path: Path, packing: str) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(VALUES), tmp_path / "x.parquet", row_group_size=2)
    found = read(PACKERS[packing]((tmp_path / "x.parquet").read_bytes()), f"x.parquet{packing}")
    assert found == PLAIN_ROWS
    assert [json.loads(encode(row, 0)) for row in found] == PLAIN_ROWS


def test_times_of_arrow_keep_microseconds_and_are_refused_beyond() -> None:
    pa = pytest.importorskip("pyarrow")
    fine = pa.table({"at": pa.array([1_000], pa.timestamp("ns", "UTC")), "of_day": pa.array([1_000], pa.time64("ns"))})
    assert list(rows_of_arrow(fine.to_batches())) == [{"at": "1970-01-01T00:00:00.000001+00:00", "of_day": "00:00:00.000001"}]
    with pytest.raises(BadRecord, match="a time has more digits than microseconds"):
        list(rows_of_arrow(pa.table({"at": pa.array([1_001], pa.timestamp("ns"))}).to_batches()))


def test_values_of_parquet_that_json_or_python_does_not_have_are_named_with_their_file(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for value, kind, said in (
        ({"t": 1789}, pa.struct([("t", pa.time64("ns"))]), "a time has more digits than microseconds"),
        ([1789], pa.list_(pa.timestamp("ns")), "a time has more digits than microseconds"),
        ([("a", 1), ("a", 2)], pa.map_(pa.string(), pa.int64()), "a value cannot be read"),
        (5_000_000, pa.date32(), "a value cannot be read: date value out of range"),
        (1, pa.timestamp("us", "Mars/Base"), "a value cannot be read"),
    ):
        pq.write_table(pa.table({"v": pa.array([value], kind)}), tmp_path / "x.parquet")
        with pytest.raises(BadRecord, match=rf"x\.parquet: {said}"):
            read((tmp_path / "x.parquet").read_bytes(), "x.parquet")
    for value, kind, found in (
        ([("a", 1), ("b", 2)], pa.map_(pa.string(), pa.int64()), {"a": 1, "b": 2}),
        ([(7, {"t": 1000})], pa.map_(pa.int64(), pa.struct([("t", pa.time64("ns"))])), {"7": {"t": "00:00:00.000001"}}),
    ):
        pq.write_table(pa.table({"v": pa.array([value], kind)}), tmp_path / "x.parquet")
        assert read((tmp_path / "x.parquet").read_bytes(), "x.parquet") == [{"v": found}]


def test_times_that_spark_writes_as_int96_have_any_year(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    days = [datetime(1, 1, 1), datetime(1582, 10, 15), datetime(9999, 12, 31, 23, 59, 59, 999_999)]
    pq.write_table(pa.table({"at": days}), tmp_path / "x.parquet", use_deprecated_int96_timestamps=True)
    stored = pq.read_table(tmp_path / "x.parquet", coerce_int96_timestamp_unit="us")["at"].to_pylist()
    assert [row["at"] for row in read((tmp_path / "x.parquet").read_bytes(), "x.parquet")] == [day.isoformat() for day in stored]


def test_a_text_without_the_mark_that_its_encoding_needs_is_named() -> None:
    with pytest.raises(BadRecord, match=r"x\.csv: the text cannot be read: UTF-16 stream does not start with BOM"):
        list(records_of(io.BytesIO("a,b\n1,2\n".encode("utf-16-le")), "x.csv", Reading(encoding="utf-16"), print))


def test_zstandard_may_begin_with_a_frame_that_is_passed_over() -> None:
    pa = pytest.importorskip("pyarrow")
    data = b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + pa.compress(b'{"a":1}\n', "zstd", asbytes=True)
    assert read(data, "x.jsonl.zst") == [b'{"a":1}']


def test_zstandard_is_read_by_its_first_bytes() -> None:
    pa = pytest.importorskip("pyarrow")
    packed = pa.compress(b"id,shop\n1,eu\n2,us\n", "zstd", asbytes=True)
    assert read(packed, "x.csv") == ROWS
    assert read(packed, "x.csv.zst") == ROWS
    with pytest.raises(BadRecord, match="damaged, or a part of it is missing"):
        read(packed[:9] + b"?" * 20, "x.csv.zst")


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.parquet"])
def test_a_disk_that_fails_is_not_called_damage(name: str) -> None:
    class Failing(io.RawIOBase):
        def __init__(self) -> None:
            self._begin = b"[1,\n2,\n"

        def readable(self) -> bool:
            return True

        def readinto(self, target: Any) -> int:
            if not self._begin:
                raise OSError(5, "Input/output error")
            data, self._begin = self._begin, b""
            target[: len(data)] = data
            return len(data)

    with pytest.raises(OSError, match="Input/output error"):
        list(records_of(Failing(), name, Reading(), print))  # type: ignore[arg-type]


def test_what_is_a_file_of_the_format_may_have_no_seek() -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    whole = io.BytesIO()
    pq.write_table(pa.table({"a": [1, 2]}), whole)

    class Stream(io.RawIOBase):
        def __init__(self) -> None:
            self._file = io.BytesIO(whole.getvalue())

        def readable(self) -> bool:
            return True

        def readinto(self, target: Any) -> int:
            return self._file.readinto(target)

    assert list(records_of(Stream(), "x.parquet", Reading(), print)) == [{"a": 1}, {"a": 2}]  # type: ignore[arg-type]


def test_plain_leaves_what_json_has_and_names_nothing_else() -> None:
    assert plain({"a": (1, [2.5]), "b": None, "c": True}) == {"a": [1, [2.5]], "b": None, "c": True}
    with pytest.raises(BadRecord, match=r"record 3 .dict. cannot be written as JSON"):
        encode(plain({"a": timedelta(1)}), 3)
    assert set(FORMATS.values()) == {"jsonl", "json", "csv", "parquet", "text"}


@pytest.mark.parametrize("name", ["x.parquet", "x.csv.zst"])
def test_a_package_that_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadArgument, match=f"^{name}: to read this file, pyarrow is needed; install qewqew.files.$"):
        read(b"\x28\xb5\x2f\xfd", name)


@pytest.mark.parametrize(
    ("name", "begin", "filling"),
    [
        ("x.jsonl.gz", b"", b"x"),
        ("x.txt.gz", b"", b" "),
        ("x.csv.gz", b"a,b\n", b"x"),
        ("x.csv.gz", b"a\n", b'"'),
        ("x.json.gz", b'["', b"x"),
    ],
)
def test_a_small_file_that_unpacks_to_a_gibibyte_does_not_fill_the_memory(name: str, begin: bytes, filling: bytes) -> None:
    members = [gzip.compress(begin), *[gzip.compress(filling * (16 << 20))] * 64]
    records = records_of(io.BytesIO(b"".join(members)), name, Reading(), lambda said: None)
    tracemalloc.start()
    try:
        with pytest.raises(BadRecord, match="longer than 64 MiB"):
            next(records)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 512 << 20


@pytest.mark.parametrize("packing", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("behind", ["nothing", "whole", "zeros", "damaged", "cut", "garbage"])
def test_a_packed_file_of_several_parts_is_read_to_its_end_or_refused(packing: str, behind: str) -> None:
    pack = PACKERS[packing]
    parts = [pack(b"%d\n" % number * 1000) for number in range(2)]
    damaged = parts[1][:20] + b"?" * (len(parts[1]) - 20)
    more = {"nothing": b"", "whole": parts[1], "zeros": bytes(8), "damaged": damaged, "cut": parts[1][:-5], "garbage": b"garbage"}
    data = parts[0] + more[behind]
    if behind in ("nothing", "whole", "zeros"):
        assert read(data, f"x.txt{packing}") == [b"0"] * 1000 + [b"1"] * 1000 * (behind == "whole")
        return
    with pytest.raises(BadRecord, match="damaged, or a part of it is missing"):
        read(data, f"x.txt{packing}")
