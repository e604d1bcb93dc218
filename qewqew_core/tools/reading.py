"""The records of files as people have them: JSON, CSV, Parquet and text, compressed or not, one after the other.

Memory is bounded by the longest record, which may have 64 MiB. What a file is, its name says, or the caller; that it is
compressed, its first bytes say. A text file is UTF-8, unless it begins with a byte order mark, or its encoding is given.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain, islice, repeat
from typing import Any, BinaryIO, cast

from qewqew_core.errors import BadArgument, BadRecord
from qewqew_core.secrecy import excerpt
from qewqew_core.tools.rows import Row, needs, rows_of_parquet

# By the end of a file's name, without that of its compression
FORMATS = {
    **{".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv"},
    **{".parquet": "parquet", ".txt": "text", ".log": "text"},
}
_NAMES = ", ".join(sorted({*FORMATS.values()}))
_PACKED: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": lambda file: io.BufferedReader(_Parts(file, bz2.BZ2Decompressor)),
    b"\xfd7zXZ\0": lambda file: io.BufferedReader(_Parts(file, lzma.LZMADecompressor)),
}
_ZSTD = re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")  # or a frame that is passed over
_ENDINGS = (".gz", ".bz2", ".xz", ".zst")
_MARKS = {  # the longer ones first
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_BLOCK = 1 << 20  # characters of JSON that are read at a time
LONGEST = 64 << 20  # characters of a line, or of a value of JSON: a compressed file of zeros would fill the memory
_SAMPLE = 20  # lines of CSV in which the delimiter is looked for
_DELIMITERS = ",;\t|"
_SAID = re.compile(r"(?i)(?P<quote>\"?)sep=(?P<sign>[^\r\n])(?P=quote)(?P<end>\r?\n|\r)")  # the first line, for Excel
_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:[. \xa0']\d{3})+|\d+)(?:,\d+)?")  # where the comma is the decimal sign


@dataclass(frozen=True)
class Reading:
    """How a file is read; None: as the file itself says, or by the rule of `records_of`. Raises `BadArgument`."""

    format: str | None = None  # one of the values of FORMATS
    encoding: str | None = None  # of text, JSON and CSV, as Python names it
    delimiter: str | None = None  # of CSV: one character
    quote: str = '"'  # of CSV: one character, or "" for none
    names: tuple[str, ...] | None = None  # of the columns of a CSV file that has no header
    null: str = ""  # of CSV: the text that stands for no value
    decimal_comma: tuple[str, ...] = ()  # of CSV: the columns in which 1.234,5 is to be 1234.5

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in FORMATS.values():
            raise BadArgument(f"the format is {excerpt(self.format, 40)}; it must be one of {_NAMES}")
        if self.encoding is not None:
            try:
                "".encode(self.encoding)  # which is not done by a codec of bytes, such as hex
            except LookupError as error:
                raise BadArgument(f"no encoding is called {excerpt(self.encoding, 40)}; utf-8, latin-1 and utf-16 are") from error
        for name, allowed in (
            ("delimiter", self.delimiter is None or (len(self.delimiter) == 1 and self.delimiter not in "\r\n")),
            ("quote", len(self.quote) < 2),
        ):
            if not allowed:
                raise BadArgument(f"the {name} must be one character, not {excerpt(getattr(self, name), 40)}")
        if self.names is not None and len({*self.names}) < len(self.names):
            raise BadArgument("two of the names of the columns are the same")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Reading:
        """From options by name; of several names of columns a list, or a text with commas between them. Raises `BadArgument`."""
        known, found = {field.name for field in fields(cls)}, dict[str, Any]()
        for name, value in options.items():
            if name not in known:
                raise BadArgument(f"no option of a file is called {excerpt(name, 40)}; these are: {', '.join(sorted(known))}")
            several = name in ("names", "decimal_comma")
            found[name] = tuple(value.split(",") if isinstance(value, str) else value) if several else value
            if not all(isinstance(each, str) for each in (found[name] if several else [value])):
                raise BadArgument(f"the option {name} must be {'names of columns' if several else 'a text'}")
        return cls(**found)

    def format_of(self, name: str) -> str:
        """The format of the file with this name. Raises `BadArgument` if it says none."""
        ending = _ending(name)
        format = self.format or FORMATS.get(ending)
        if format is None:
            of = f"ends with {ending!r}" if ending else "has no ending"
            raise BadArgument(f"its name {of}, which says no format; give one of {_NAMES}", path=name)
        of_csv = [field.name for field in fields(self)[2:] if getattr(self, field.name) != field.default]
        if of_csv and format != "csv":
            raise BadArgument(f"{of_csv[0]} is for CSV, but the format is {format}", path=name)
        if self.encoding and format == "parquet":
            raise BadArgument(f"encoding is for texts, but the format is {format}", path=name)
        return format


def _ending(name: str) -> str:
    base = os.path.basename(name).lower()
    for packed in _ENDINGS:
        base = base.removesuffix(packed)
    return os.path.splitext(base)[1]


def tells_format(name: str) -> bool:
    """Whether the name of a file says more than that it has lines of text: a format, or that it is compressed."""
    return name.lower().endswith(_ENDINGS) or FORMATS.get(_ending(name), "text") != "text"


def records_of(file: BinaryIO, name: str, reading: Reading, tell: Callable[[str], None]) -> Iterator[bytes | Row]:
    """The records of an open file: lines, JSON values as they are written, or rows.

    =========== ============================================================================================================
    ``jsonl``   each line as it is, to be decoded by who reads the record
    ``text``    each line as it is
    ``json``    each element of an array, or each of the values that follow each other
    ``csv``     a row for each line, by the names in the first one; its values are texts, or None where ``null`` stands
    ``parquet`` a row for each of its rows (needs pyarrow)
    =========== ============================================================================================================

    Blank lines are left out. ``tell`` is given what was found: a delimiter, and how many lines were blank. Raises `BadRecord`
    with the file's name and the line, `BadArgument` if the format is not known, or a package is missing.
    """
    format = reading.format_of(name)
    opened, is_packed = _unpacked(file, name)
    try:
        if format == "parquet":
            yield from rows_of_parquet(opened, name)
        elif format == "csv":
            yield from _csv(opened, name, reading, tell)
        elif format == "json":
            yield from _json(_text(opened, reading.encoding), name)
        else:
            yield from _lines(opened, name, reading.encoding, tell)
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        if not is_packed or getattr(error, "errno", None) is not None:  # it is the disk, or the store
            raise
        what = f"the compressed file is damaged, or a part of it is missing: {error}. Nothing was stored"
        raise BadRecord(what, path=name) from error
    except UnicodeError as error:
        raise BadRecord(f"the text cannot be read: {error}. Nothing was stored", path=name) from error
    except BadRecord as error:
        if error.path is None:  # of a row of Arrow
            raise BadRecord(error.what, path=name) from error
        raise


def _unpacked(file: BinaryIO, name: str) -> tuple[BinaryIO, bool]:
    """The content of a file, and whether it was compressed."""
    buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(cast(io.RawIOBase, _Raw(file)))
    begin = buffered.peek(6)[:6]
    if _ZSTD.match(begin):
        try:
            import pyarrow as pa
        except ImportError as error:
            raise needs("pyarrow", name) from error
        return io.BufferedReader(cast(io.RawIOBase, _Raw(pa.CompressedInputStream(buffered, "zstd")))), True
    for magic, unpack in _PACKED.items():
        if begin.startswith(magic):
            return unpack(buffered), True
    return buffered, False


class _Raw(io.RawIOBase):
    """What has read() and may have no more, as a file that can be buffered."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        data = self._file.read(len(target))
        target[: len(data)] = data
        return len(data)

    def seekable(self) -> bool:
        return bool(getattr(self._file, "seekable", lambda: False)())

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())


class _Parts(io.RawIOBase):
    """What bzip2 or xz has packed, part after part. (Python's own readers pass over a damaged part, and all behind it.)"""

    def __init__(self, file: BinaryIO, make: Callable[[], Any]) -> None:
        self._file, self._make, self._part, self._rest = file, make, make(), b""

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while True:
            if self._part.eof:
                self._rest = (self._part.unused_data or self._file.read(1 << 16)).lstrip(b"\0")  # xz may pad with zeros
                if not self._rest:
                    return 0
                self._part = self._make()
            if self._part.needs_input and not self._rest and not (block := self._file.read(1 << 16)):
                raise EOFError("it ends in the middle")
            elif self._part.needs_input and not self._rest:
                self._rest = block
            data = self._part.decompress(self._rest, len(target))
            self._rest = b""
            if data:
                target[: len(data)] = data
                return len(data)


# Texts


def _encoding(file: BinaryIO, given: str | None) -> str:
    begin = cast(io.BufferedReader, file).peek(4)[:4]
    marked = next((encoding for mark, encoding in _MARKS.items() if begin.startswith(mark)), None)
    if marked is not None and (given is None or codecs.lookup(given).name.startswith("utf")):
        return marked
    return given or "utf-8"


def _text(file: BinaryIO, encoding: str | None) -> io.TextIOWrapper:
    if not hasattr(file, "peek"):
        file = cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, _Raw(file))))
    return io.TextIOWrapper(file, _encoding(file, encoding), newline="")


def _lines(file: BinaryIO, name: str, encoding: str | None, tell: Callable[[str], None]) -> Iterator[bytes]:
    """Without their ends, which may be LF, CRLF or CR."""
    text = _text(file, encoding)
    is_utf8 = codecs.lookup(text.encoding).name in ("utf-8", "utf-8-sig")
    # Bytes are not checked to be UTF-8: whether a record can be decoded is found out, and counted, where it is read.
    found: Iterator[bytes] = _limited(text.detach(), name) if is_utf8 else _encoded(text, name)
    blank = 0
    for number, line in enumerate(found):
        for record in (line.removeprefix(codecs.BOM_UTF8) if number == 0 else line).splitlines():
            if record.strip():
                yield record
            else:
                blank += 1
    _tell_blank(blank, tell)


def _limited(file: Any, name: str) -> Iterator[Any]:
    """The lines of a file of bytes, or of text."""
    number = 0
    while line := file.readline(LONGEST + 1):
        number += 1
        if len(line) > LONGEST:
            raise BadRecord(f"line {number:,} is longer than {LONGEST >> 20} MiB. Nothing was stored", path=name)
        yield line


def _encoded(text: io.TextIOWrapper, name: str) -> Iterator[bytes]:
    number = 0
    try:
        for number, line in enumerate(_limited(text, name), 1):  # noqa: B007
            yield line.encode()
    except UnicodeDecodeError as error:
        raise _undecodable(name, number + 1, error) from error


def _undecodable(name: str, line: int, error: UnicodeDecodeError) -> BadRecord:
    line += error.object.count(b"\n", 0, error.start)  # of the block that is decoded
    what = f"near line {line:,}: this is not {error.encoding} ({error.reason}); say which encoding it is, such as latin-1"
    return BadRecord(f"{what}. Nothing was stored", path=name)


def _tell_blank(blank: int, tell: Callable[[str], None]) -> None:
    if blank:
        tell(f"{blank:,} blank lines were left out")


# JSON


def _constant(text: str) -> None:
    raise ValueError(f"{text} is not a value")


_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_constant)


class _Json:
    """JSON text that is read as it is needed."""

    def __init__(self, text: io.TextIOWrapper, name: str) -> None:
        self._text, self._name = text, name
        self._buffer, self._at, self._line, self._is_all = "", 0, 1, False

    def _more(self) -> bool:
        """Read more, the more the longer a value is, so that its time stays in proportion to its length."""
        if self._is_all:
            return False
        try:
            block = self._text.read(max(_BLOCK, len(self._buffer) - self._at))
        except UnicodeDecodeError as error:
            raise _undecodable(self._name, self._line + self._buffer.count("\n"), error) from error
        self._line += self._buffer.count("\n", 0, self._at)
        self._buffer, self._at, self._is_all = self._buffer[self._at :] + block, 0, not block
        return bool(block)

    def next(self) -> str:
        """The next character that is not white space; "" at the end."""
        while True:
            found = _SPACE.match(self._buffer, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more():
                return ""

    def skip(self) -> None:
        self._at += 1

    def value(self) -> bytes:
        """The value that begins here, as it is written."""
        while True:
            try:
                _, end = _DECODER.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                # A value that is cut is wrong at its end, or where a text begins.
                if (error.pos + 16 < len(self._buffer) and not error.msg.startswith("Unterminated")) or not self._more():
                    raise self.bad(error.msg, error.pos) from error
                if len(self._buffer) > LONGEST:
                    raise self.bad(f"a value is longer than {LONGEST >> 20} MiB", self._at) from error
                continue
            except (ValueError, RecursionError) as error:
                raise self.bad(str(error), self._at) from error
            if end < len(self._buffer) or not self._more():
                written, self._at = self._buffer[self._at : end], end
                return written.encode("utf-8", "surrogatepass")

    def bad(self, what: str, at: int | None = None) -> BadRecord:
        line = self._line + self._buffer.count("\n", 0, self._at if at is None else at)
        return BadRecord(f"near line {line:,}: not JSON: {what}. Nothing was stored", path=self._name)


def _json(text: io.TextIOWrapper, name: str) -> Iterator[bytes]:
    found = _Json(text, name)
    if found.next() != "[":
        while found.next():
            yield found.value()
        return
    found.skip()
    while (sign := found.next()) != "]":
        yield found.value()
        if (sign := found.next()) == ",":
            found.skip()
            if found.next() == "]":
                raise found.bad("a value must follow the comma")
        elif sign != "]":
            raise found.bad(f"after a value of the array comes {sign!r}, not a comma" if sign else "the array has no end")
    found.skip()
    if found.next():
        raise found.bad("something follows the array")


# CSV


def _csv(file: BinaryIO, name: str, reading: Reading, tell: Callable[[str], None]) -> Iterator[Row]:
    text = _text(file, reading.encoding)
    rows = csv.reader([])
    try:
        csv.field_size_limit(LONGEST)
        lines = _limited(text, name)
        first = list(islice(lines, _SAMPLE))
        if said := _SAID.fullmatch(first[0] if first else ""):
            first[0] = said["end"]  # a blank line, so that the others keep their numbers
        delimiter = reading.delimiter or (said["sign"] if said else _delimiter(first, reading.quote, name))
        style: dict[str, Any] = {"quotechar": reading.quote} if reading.quote else {"quoting": csv.QUOTE_NONE}
        rows = csv.reader(chain(first, lines), strict=True, delimiter=delimiter, **style)
        names = list(reading.names or next(filter(None, rows), []))
        if len(set(names)) < len(names):
            raise BadRecord("the first line has a column twice. Nothing was stored", path=name)
        if missing := [*set(reading.decimal_comma) - set(names)]:
            raise BadArgument(f"there is no column {excerpt(missing[0], 40)}, which is to have a decimal comma", path=name)
        if names:
            shown = ", ".join(excerpt(each, 40) for each in names[:10]) + (" …" if len(names) > 10 else "")
            tell(f"CSV in {text.encoding}, delimiter {delimiter!r}, columns {shown}")
        blank = 0
        for row in rows:
            if len(row) == len(names):
                yield dict(zip(names, map(_value, row, names, repeat(reading)), strict=True))
            elif row:
                first_has = f"there are {len(names)} names" if reading.names else f"the first line has {len(names)}"
                what = f"line {rows.line_num:,} has {len(row)} fields, but {first_has}"
                raise BadRecord(f"{what} (delimiter {delimiter!r}). Nothing was stored", path=name)
            else:
                blank += 1
    except csv.Error as error:
        raise BadRecord(f"near line {rows.line_num:,}: not CSV: {error}. Nothing was stored", path=name) from error
    except UnicodeDecodeError as error:
        raise _undecodable(name, rows.line_num + 1, error) from error
    _tell_blank(blank, tell)


def _delimiter(lines: list[str], quote: str, name: str) -> str:
    """The one that divides each of the first lines into as many fields as the first one, or else that line, and into the most."""
    if _ending(name) == ".tsv":
        return "\t"

    def fit(delimiter: str) -> tuple[bool, int]:
        style: dict[str, Any] = {"quotechar": quote} if quote else {"quoting": csv.QUOTE_NONE}
        rows = [row for row in csv.reader(lines, delimiter=delimiter, **style) if row]
        complete = rows[:-1] if len(lines) == _SAMPLE and len(rows) > 1 else rows  # the last one may go on behind the sample
        fields = len(rows[0]) if rows else 1
        return fields > 1 and {len(row) for row in complete} == {fields}, fields

    return max(_DELIMITERS, key=fit)  # of those that fit alike the first one


def _value(text: str, column: str, reading: Reading) -> str | None:
    if text == reading.null:
        return None
    if column in reading.decimal_comma and _NUMBER.fullmatch(text):
        return re.sub("[. \xa0']", "", text).replace(",", ".")
    return text
