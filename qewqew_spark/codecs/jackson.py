"""A reader of JSON tokens which accepts and refuses what Jackson does, as Spark configures it.

Spark's JSON reader goes on after some errors, at the token where Jackson stopped. To have the same rows as
`spark.read.json` of texts that are cut off or wrong in the middle, the errors leave the reader here where
they leave Jackson's UTF8StreamJsonParser: that is what is odd in this module. Beyond the standard it takes
strings in single quotes, ``\\'`` in a string, ``NaN``, ``Infinity``, ``-INF`` and the like.
"""

from __future__ import annotations

import binascii
import re
import unicodedata
from collections.abc import Callable

MAX_DEPTH = 1000  # limits of Jackson
MAX_DIGITS = 1000
MAX_NAME = 50_000

OBJECT, END_OBJECT, ARRAY, END_ARRAY, NAME, STRING, INTEGER, FLOAT, TRUE, FALSE, NULL = (
    "{", "}", "[", "]", "name", "string", "integer", "float", "true", "false", "null",
)  # fmt: skip

SPACE = b" \t\r\n"
_SPACE = re.compile(rb"[ \t\r\n]*")
_NUMBER = re.compile(rb"-?([0-9]*)(?:(\.)([0-9]*))?(?:([eE][+-]?)([0-9]*))?")
_PLAIN = re.compile(rb"[^\"\\\x00-\x1f\x80-\xff]*")
_PLAIN_QUOTED = re.compile(rb"[^'\\\x00-\x1f\x80-\xff]*")
_NAME = re.compile(rb"[^\"\\\x00-\x1f]*")
_NAME_QUOTED = re.compile(rb"[^'\\\x00-\x1f]*")
_ESCAPES = dict(zip(b"btnfr\"/\\'", "\b\t\n\f\r\"/\\'", strict=True))
_LITERALS = {ord("t"): (b"true", TRUE), ord("f"): (b"false", FALSE), ord("n"): (b"null", NULL)}
_STRANGE = {ord("N"): b"NaN", ord("I"): b"Infinity"}


class Malformed(ValueError):
    """The text is no JSON, or beyond a limit."""


class Unpadded(ValueError):
    """Base64 that ends early."""


class _Scope:
    __slots__ = "empty", "kind", "name"

    def __init__(self, kind: str) -> None:
        self.kind = kind  # OBJECT, ARRAY or "" for the root
        self.empty = True
        self.name: str | None = None  # of the last field


def text_of(units: str) -> str:
    """A text out of one that may hold halves of UTF-16 pairs: joined where they are pairs, else a question mark, as Java does."""
    joined = units.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return joined.encode("utf-8", "replace").decode()


class Reader:
    """Goes through one text token by token; each method raises `Malformed`."""

    def __init__(self, data: bytes, begin: int = 0) -> None:
        self._data = data
        self._end = len(data)
        self._scopes = [_Scope("")]
        self._next: str | None = None  # the value behind a name is read with the name
        self._pending = 0  # the quote that ends the string which has been begun, or 0
        self._text = ""  # of the current string or number, once it is read
        self.at = begin
        self.begin = 0  # where the current value begins
        self.token: str | None = None

    @property
    def name(self) -> str | None:
        """Of the field that the current token belongs to."""
        scope = self._scopes[-2] if self.token in (OBJECT, ARRAY) else self._scopes[-1]
        return scope.name

    def next(self) -> str | None:
        """The next token; None at the end of the text."""
        if self.token == NAME:
            token, self._next = self._next, None
            return self._enter(token)
        if self._pending:
            self._pending = 0
            self._string(ord('"'), skip=True)
        char = self._skip_space()
        if char < 0:
            if len(self._scopes) > 1:
                raise Malformed("the text ends within an object or array")
            self.token = None
            return None
        if char in b"]}":
            self.begin = self.at - 1
            scope = self._scopes[-1]
            if scope.kind != ("[" if char == ord("]") else "{"):
                raise Malformed("mismatched bracket")
            self._scopes.pop()
            self.token = END_ARRAY if char == ord("]") else END_OBJECT
            return self.token
        scope = self._scopes[-1]
        if scope.empty:
            scope.empty = False
        elif scope.kind:
            if char != ord(","):
                raise Malformed("no comma")
            char = self._must(self._skip_space())
        if scope.kind != OBJECT:
            self.begin = self.at - 1
            return self._enter(self._value(char))
        scope.name = self._field(char)
        self.token = NAME
        if self._must(self._skip_space()) != ord(":"):
            raise Malformed("no colon")
        char = self._must(self._skip_space())
        self.begin = self.at - 1
        self._next = self._value(char)
        return NAME

    def skip(self) -> None:
        """Behind the end of the current object or array; any other token is left as it is."""
        depth = int(self.token in (OBJECT, ARRAY))
        while depth:
            token = self.next()
            if token is None:
                return
            depth += (token in (OBJECT, ARRAY)) - (token in (END_OBJECT, END_ARRAY))

    def text(self) -> str:
        """Of the current token: of a string its characters, of a number its digits."""
        if self._pending:
            self._pending = 0
            self._text = self._string(ord('"'))
        return self._text

    def raw(self) -> bytes:
        """The bytes of the current value, of an object or array to its end, which is the current token then."""
        begin = self.begin
        self.skip()
        return self._data[begin : self.at]

    def base64(self) -> bytes:
        """What the current string encodes in base64; raises `ValueError` if it is not padded, or something else."""
        if not self._pending:
            chars = iter(self._text)
            return _from_base64(lambda: next(chars, ""))
        try:
            found = _from_base64(self._character)
        except Unpadded:
            self.at -= 1  # the quote, which ends the string also when it is skipped
            raise
        self._pending = 0
        return found

    def _character(self) -> str:
        """The next one of the pending string, "" at its end."""
        char = self._must(self._byte())
        return self._escaped() if char == ord("\\") else "" if char == ord('"') else chr(char)

    def _enter(self, token: str | None) -> str | None:
        if token in (OBJECT, ARRAY):
            self._scopes.append(_Scope(token))
            if len(self._scopes) - 1 > MAX_DEPTH:
                raise Malformed("nested too deeply")
        self.token = token
        return token

    def _byte(self) -> int:
        if self.at >= self._end:
            return -1
        self.at += 1
        return self._data[self.at - 1]

    @staticmethod
    def _must(char: int) -> int:
        if char < 0:
            raise Malformed("the text ends early")
        return char

    def _skip_space(self) -> int:
        """The first byte that is no white space, and the place behind it; -1 at the end."""
        found = _SPACE.match(self._data, self.at)
        assert found is not None
        self.at = found.end()
        char = self._byte()
        if 0 <= char < 32 or char == ord("/"):
            raise Malformed("a control character, or a comment")
        return char

    def _value(self, char: int) -> str:
        if char == ord('"'):
            self._pending = char
            return STRING
        if char in b"{[":
            return chr(char)
        if 48 <= char <= 57 or char == ord("-"):
            return self._number(char)
        if char in _LITERALS:
            word, token = _LITERALS[char]
            self._word(word, 1)
            self._text = word.decode()
            return token
        if char == ord("'"):
            self._text = self._string(char)
            return STRING
        if char in _STRANGE:
            self._word(_STRANGE[char], 1)
            self._text = _STRANGE[char].decode()
            return FLOAT
        if char == ord("+"):
            return self._infinity(self._must(self._byte()), "+")
        if chr(char) == "$" or chr(char).isalpha() or chr(char) == "_" or char in _LATIN_STARTS:
            self._unknown_word()
        raise Malformed("no value")

    def _number(self, first: int) -> str:
        begin = self.at - 1
        if first == ord("-"):
            first = self._must(self._byte())
            if not 48 <= first <= 57:
                if first == ord("."):
                    raise Malformed("a number begins with a period")
                return self._infinity(first, "-")
        if first == 48 and self._data[self.at : self.at + 1].isdigit():
            raise Malformed("a number begins with a zero")
        found = _NUMBER.match(self._data, begin)
        assert found is not None
        whole, period, fraction, exponent, power = found.groups()
        if period and not fraction:
            self.at = min(found.start(3) + 1, self._end)
            raise Malformed("no digit behind the period")
        if exponent and not power:
            self.at = min(found.start(5) + 1, self._end)
            raise Malformed("no digit in the exponent")
        self.at = found.end()
        self._text = found.group().decode()
        if len(self._scopes) == 1 and self.at < self._end and self._data[self.at] not in SPACE:
            self.at += 1
            raise Malformed("no space behind a number")
        if len(whole) + len(fraction or b"") + len(power or b"") > MAX_DIGITS:
            raise Malformed("a number of too many digits")
        return FLOAT if period or exponent else INTEGER

    def _infinity(self, char: int, sign: str) -> str:
        if char == ord("I"):
            second = self._must(self._byte())
            if second in b"Nn":
                word = b"INF" if second == ord("N") else b"Infinity"
                self._word(b"+" + word, 3)
                self._text = sign + word.decode()
                return FLOAT
        raise Malformed("no digit behind the sign")

    def _word(self, word: bytes, index: int) -> None:
        """The rest of a word whose first ``index`` characters have been read."""
        for expected in word[index:]:
            if self.at >= self._end or self._data[self.at] != expected:
                self._unknown_word()
            self.at += 1
        if self.at < self._end:
            char = self._data[self.at]
            if char >= 128:  # for its message Jackson reads it again, as the second byte of a character, if it can be a first one
                self.at += 0xC0 <= char < 0xF8
                raise Malformed("a byte that is no UTF-8")
            if char >= 48 and _in_identifier(chr(char)):
                self._unknown_word()

    def _unknown_word(self) -> None:
        """Jackson reads the whole word, and what ends it, for its message."""
        length = 0
        while self.at < self._end and length < 256:
            char = self._data[self.at]
            self.at += 1
            units = chr(char) if char < 128 else self._multibyte(char)
            if not _in_identifier(units[-1]):
                break
            length += 1
        raise Malformed("an unknown word")

    def _string(self, quote: int, skip: bool = False) -> str:
        """To the quote that ends it; halves of pairs as three bytes each pass only in what is skipped."""
        plain = _PLAIN if quote == ord('"') else _PLAIN_QUOTED
        parts = []
        while True:
            found = plain.match(self._data, self.at)
            assert found is not None
            parts.append(found.group().decode())
            self.at = found.end()
            char = self._must(self._byte())
            if char == quote:
                break
            if char < 32:
                raise Malformed("a control character in a string")
            if char == ord("\\"):
                parts.append(self._escaped())
            else:
                parts.append(self._multibyte(char))
                if not skip and len(parts[-1]) == 1 and "\ud800" <= parts[-1] < "\ue000":
                    raise Malformed("half of a pair in UTF-8")
        return "".join(parts)

    def _field(self, char: int) -> str:
        if char not in b"\"'":
            if char >= 128:
                self._multibyte(char)
            raise Malformed("no name")
        plain = _NAME if char == ord('"') else _NAME_QUOTED
        parts = []
        while True:
            found = plain.match(self._data, self.at)
            assert found is not None
            parts.append(found.group())
            self.at = found.end()
            end = self._must(self._byte())
            if end == char:
                break
            if end != ord("\\"):
                raise Malformed("a control character in a name")
            parts.append(self._escaped().encode("utf-8", "surrogatepass"))
        name = b"".join(parts)
        if len(name) > MAX_NAME:
            raise Malformed("a name that is too long")
        try:
            return name.decode()
        except UnicodeDecodeError:
            units = text_units(name)
        try:
            return units.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError as error:
            raise Malformed("half of a pair in a name") from error

    def _escaped(self) -> str:
        char = self._must(self._byte())
        if char in _ESCAPES:
            return _ESCAPES[char]
        if char != ord("u"):
            if char >= 128:
                self._multibyte(char)
            raise Malformed("an unknown escape")
        value = 0
        for _ in range(4):
            digit = self._must(self._byte())
            if digit not in b"0123456789abcdefABCDEF":
                raise Malformed("no hexadecimal digit")
            value = value << 4 | int(chr(digit), 16)
        return chr(value)

    def _multibyte(self, first: int) -> str:
        """The character of several bytes that begins with ``first``: halves of a pair where it takes two."""
        more = 1 if first & 0xE0 == 0xC0 else 2 if first & 0xF0 == 0xE0 else 3 if first & 0xF8 == 0xF0 else 0
        if not more:
            raise Malformed("a byte that is no UTF-8")
        value = first & (0x1F, 0x0F, 0x07)[more - 1]
        for _ in range(more):
            char = self._must(self._byte())
            if char & 0xC0 != 0x80:
                raise Malformed("a byte that is no UTF-8")
            value = value << 6 | char & 0x3F
        return _units(value, more)


# Letters of Latin-1, as which Jackson takes the first byte of a value.
_LATIN_STARTS = frozenset(char for char in range(128, 256) if chr(char).isalpha() or unicodedata.category(chr(char)) == "Sc")
_BASE64 = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")


def _units(value: int, more: int) -> str:
    if more < 3:
        return chr(value)
    value -= 0x10000
    return chr((0xD800 | value >> 10) & 0xFFFF) + chr(0xDC00 | value & 0x3FF)


def text_units(data: bytes) -> str:
    """Bytes as text, laxly as Jackson decodes UTF-8: overlong forms and halves of pairs pass."""
    reader, parts = Reader(data), []
    while (char := reader._byte()) >= 0:
        parts.append(chr(char) if char < 128 else reader._multibyte(char))
    return "".join(parts)


def _in_identifier(char: str) -> bool:
    if char == "$" or char.isalnum():
        return True
    return unicodedata.category(char) in ("Sc", "Pc", "Nl", "Mn", "Mc", "Cf") or char in _IGNORED


_IGNORED = frozenset(map(chr, [*range(9), *range(0x0E, 0x1C), *range(0x7F, 0xA0)]))


def _from_base64(character: Callable[[], str]) -> bytes:
    """``character``: gives the next one, "" at the end. White space may stand in front of each four."""
    found = bytearray()
    while True:
        char = character()
        while char and char <= " ":
            char = character()
        if not char:
            return bytes(found)
        four = ""
        for index in range(4):
            if index:
                char = character()
            if not char and index > 1 and "=" not in four:
                raise Unpadded("base64 without padding")
            if (char not in _BASE64 and (char != "=" or index < 2)) or (four[2:] == "=" and char != "="):
                raise ValueError("not base64")
            four += char
        found += binascii.a2b_base64(four)
