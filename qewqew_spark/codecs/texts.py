"""Texts as Spark's readers understand them: dates, timestamps, zones, decimals and floats.

`date_days`, `timestamp_micros` and `local_micros` take what a CAST from a string takes in Spark (the forms
``[+-]yyyy[-[m]m[-[d]d]]`` and ``…[T ][h]h:[m]m[:[s]s[.f…]][zone]``) and raise `ValueError` for anything else.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import MAX_EMAX, MIN_EMIN, ROUND_HALF_UP, Context, Decimal
from functools import lru_cache
from zoneinfo import ZoneInfo

from qewqew_core.errors import BadArgument
from qewqew_core.secrecy import excerpt

DAY = 86_400_000_000  # in microseconds
_EPOCH = date(1970, 1, 1).toordinal()
# What Spark trims from a text: white space and control characters of ASCII, and no others.
_TRIMMED = "".join(map(chr, [*range(33), 127]))
_LAST_CHAR = "\uffff"  # what is behind takes two chars in Java, none of which is a digit
JAVA_SPACE = "".join(map(chr, range(33)))  # what String.trim removes in Java
_DATE = re.compile(r"([+-]?)([0-9]{4,7})(?:-([0-9]{1,2})(?:-([0-9]{1,2})(?:[ T].*)?)?)?", re.DOTALL)
_MINUTES = r":([0-9]{1,2})(?::([0-9]{1,2})(?:\.([0-9]*))?([^0-9.].*)?)?"  # a zone only behind seconds
_CLOCK = rf"([0-9]{{1,2}})(?:{_MINUTES})?"
_MOMENT = re.compile(rf"([+-]?)([0-9]{{4,6}})(?:-([0-9]{{1,2}})(?:-([0-9]{{1,2}})(?:[ T]{_CLOCK})?)?)?", re.DOTALL)
_TIME = re.compile(rf"([0-9]{{1,2}}){_MINUTES}", re.DOTALL)
_T_TIME = re.compile(rf"T{_CLOCK}", re.DOTALL)
_OFFSET = re.compile(r"([+-])([0-9]{1,2})(?::?([0-9]{2})(?::?([0-9]{2}))?)?")
_REGION = re.compile(r"[A-Za-z][A-Za-z0-9~/._+-]+")
# The short names that Java's ZoneId.SHORT_IDS adds to the regions.
_SHORT = {
    "ACT": "Australia/Darwin", "AET": "Australia/Sydney", "AGT": "America/Argentina/Buenos_Aires", "ART": "Africa/Cairo",
    "AST": "America/Anchorage", "BET": "America/Sao_Paulo", "BST": "Asia/Dhaka", "CAT": "Africa/Harare",
    "CNT": "America/St_Johns", "CST": "America/Chicago", "CTT": "Asia/Shanghai", "EAT": "Africa/Addis_Ababa",
    "ECT": "Europe/Paris", "IET": "America/Indiana/Indianapolis", "IST": "Asia/Kolkata", "JST": "Asia/Tokyo",
    "MIT": "Pacific/Apia", "NET": "Asia/Yerevan", "NST": "Pacific/Auckland", "PLT": "Asia/Karachi", "PNT": "America/Phoenix",
    "PRT": "America/Puerto_Rico", "PST": "America/Los_Angeles", "SST": "Pacific/Guadalcanal", "VST": "Asia/Ho_Chi_Minh",
    "EST": "-05:00", "MST": "-07:00", "HST": "-10:00",
}  # fmt: skip


def java_text(data: bytes) -> str:
    """As Java decodes UTF-8: where Python puts three U+FFFD, for half of a pair in three bytes, it puts one."""
    return re.sub(rb"\xed[\xa0-\xbf][\x80-\xbf]", b"\xff", data).decode("utf-8", "replace")


def civil_days(year: int, month: int, day: int) -> int:
    """Days since 1970-01-01 in the proleptic Gregorian calendar, of any year; `ValueError` if there is no such date."""
    cycles = (year - 1) // 400  # of 146,097 days each
    return date(year - 400 * cycles, month, day).toordinal() - _EPOCH + cycles * 146_097


def date_days(text: str) -> int:
    """Days since 1970-01-01."""
    found = _DATE.fullmatch(text.strip(_TRIMMED))
    if found is None:
        raise ValueError(text)
    sign, year, month, day = found.groups()
    days = civil_days(int(sign + year), int(month or 1), int(day or 1))
    if not -(1 << 31) <= days < 1 << 31:
        raise ValueError(text)
    return days


def stored_days(text: str) -> int:
    """A date written as the number of days since 1970-01-01, which before 1582-10-15 are days of the Julian calendar."""
    if not re.fullmatch(r"[+-]?\d+", text) or max(text) > _LAST_CHAR:
        raise ValueError(text)
    days = int(text)
    if not -(1 << 31) <= days < 1 << 31:
        raise ValueError(text)
    if days >= -141_427:
        return days
    # The day of the Julian calendar, counted from the March of its year 0, as the date of the same name.
    cycles, rest = divmod(days + 719_470, 1461)
    year_in_cycle = min(rest // 365, 3)
    day_of_year = rest - 365 * year_in_cycle
    month = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * month + 2) // 5
    year = 4 * cycles + year_in_cycle + (month >= 10)
    return civil_days(year, (month + 2) % 12 + 1, 1) + day


def timestamp_micros(text: str, default: tzinfo) -> int:
    """Microseconds since the epoch; ``default``: the zone to use if the text names none."""
    days, micros, zone = _moment(text)
    found = default if zone is None else zone_of(zone)
    if days is None:
        days = datetime.now(found).date().toordinal() - _EPOCH
    return _in_long(utc_micros(days * DAY + micros, found))


def with_gmt(parse: Callable[[str], int], text: str) -> int:
    """``parse`` of the text, or else of the text without "GMT", which old versions of Spark wrote before offsets."""
    try:
        return parse(text)
    except ValueError:
        return parse(text.replace("GMT", ""))


def local_micros(text: str) -> int:
    """Microseconds since the epoch on a clock without a zone; `ValueError` if the text has a zone, or no date."""
    days, micros, zone = _moment(text)
    if days is None or zone is not None:
        raise ValueError(text)
    return _in_long(days * DAY + micros)


def _moment(text: str) -> tuple[int | None, int, str | None]:
    trimmed = text.strip(_TRIMMED)
    if found := _MOMENT.fullmatch(trimmed):
        sign, year, month, day, *clock = found.groups()
        days: int | None = civil_days(int(sign + year), int(month or 1), int(day or 1))
    elif found := (_T_TIME if text[:1] == "T" else _TIME).fullmatch(trimmed):
        days, clock = None, list(found.groups())
    else:
        raise ValueError(text)
    hour, minute, second = (int(part or 0) for part in clock[:3])
    if hour > 23 or minute > 59 or second > 59:
        raise ValueError(text)
    fraction = int(f"{clock[3] or '':0<6.6}")  # digits behind the sixth are cut off
    return days, ((hour * 60 + minute) * 60 + second) * 1_000_000 + fraction, clock[4]


def utc_micros(local: int, zone: tzinfo) -> int:
    """The moment at which clocks in ``zone`` show ``local``: the first of two; in a gap, as if it were not there."""
    if zone is UTC:
        return local
    days, micros = divmod(local, DAY)
    # datetime ends with the year 9999; rules of zones recur after 400 years, and have no beginning before the first.
    while days + _EPOCH > 3_000_000:
        days -= 146_097
    shown = datetime.fromordinal(max(days + _EPOCH, 1)) + timedelta(microseconds=micros)
    offset = zone.utcoffset(shown)
    assert offset is not None
    return local - round(offset.total_seconds()) * 1_000_000


def _in_long(micros: int) -> int:
    if not -(1 << 63) <= micros < 1 << 63:
        raise ValueError(micros)
    return micros


@lru_cache(1024)
def zone_of(name: str) -> tzinfo:
    """The zone with a name such as ``Europe/Paris``, ``Z``, ``+02:00``, ``UTC+2`` or ``CET``; `ValueError` if there is none."""
    name = name.strip(JAVA_SPACE)
    name = re.sub(r"([+-])([0-9]):", r"\g<1>0\2:", name, count=1)
    name = re.sub(r"([+-][0-9]{2}):([0-9])$", r"\1:0\2", name)
    name = _SHORT.get(name, name)
    if name == "Z" or name in ("UTC", "GMT", "UT"):
        return UTC
    prefix = re.match("UTC|GMT|UT", name)
    if (offset := _OFFSET.fullmatch(name, prefix.end() if prefix else 0)) and _well_formed(offset.group()):
        sign, *parts = offset.groups()
        hours, minutes, seconds = (int(part or 0) for part in parts)
        total = timedelta(hours=hours, minutes=minutes, seconds=seconds)
        if minutes > 59 or seconds > 59 or total > timedelta(hours=18):
            raise ValueError(name)
        return timezone(-total if sign == "-" else total)
    # zoneinfo also knows files that are not regions, their other names, and one that Java leaves out.
    if not _REGION.fullmatch(name) or name.startswith(("posix", "right/")) or name in ("Factory", "localtime", "ROC"):
        raise ValueError(name)
    try:
        return ZoneInfo(name)
    except (OSError, KeyError) as error:
        raise ValueError(name) from error


def _well_formed(offset: str) -> bool:
    """One-digit hours only alone; colons everywhere or nowhere."""
    return re.fullmatch(r"[+-]([0-9]{1,2}|[0-9]{2}(:[0-9]{2}){1,2}|[0-9]{4}|[0-9]{6})", offset) is not None


def zone_option(name: str) -> tzinfo:
    """The zone that the option ``timeZone`` names; raises `BadArgument`."""
    try:
        return zone_of(name)
    except ValueError as error:
        raise BadArgument(f"the option 'timeZone' must be a zone like Europe/Paris or +02:00, not {excerpt(name, 80)}") from error


_EXACT = Context(prec=10_000_000, rounding=ROUND_HALF_UP, Emax=MAX_EMAX, Emin=MIN_EMIN)
_LARGE = 400_000_000  # an exponent of ten, beyond which Java may refuse a number whatever its digits are
_LARGEST_POWER = 536_870_919  # of ten that Java's BigInteger has room for


def fit_decimal(value: Decimal, precision: int, scale: int) -> Decimal:
    """The value rounded half up to ``scale`` digits; `ValueError` if it then has more than ``precision``."""
    if not value.is_finite() or (value and value.adjusted() >= precision - scale + 1):
        raise ValueError(value)
    if abs(value.adjusted()) > _LARGE:
        digits_behind = -int(value.as_tuple().exponent)
        if not -(1 << 31) <= digits_behind < 1 << 31 or (value and digits_behind - scale > _LARGEST_POWER):
            raise ValueError(value)
    if not value or value.adjusted() < -scale - 1:
        return Decimal(0).scaleb(-scale)
    rounded = value.quantize(Decimal(1).scaleb(-scale), context=_EXACT)
    if rounded and rounded.adjusted() >= precision - scale:
        raise ValueError(value)
    return rounded


def to_decimal(text: str) -> Decimal:
    """A number as Java's BigDecimal writes it, with thousands separators anywhere; `ValueError` for any other text."""
    text = text.replace(",", "")
    # Digits of any script are digits in Java and in Python alike; what only Python takes is left out.
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) or max(text) > _LAST_CHAR:
        raise ValueError(text)
    return exact_decimal(text)


def exact_decimal(text: str) -> Decimal:
    """A number of JSON; `ValueError` if its exponent is too large."""
    try:
        return Decimal(text)
    except ArithmeticError as error:
        raise ValueError(text) from error


def to_float32(text: str) -> float:
    """The 32-bit float nearest to a decimal number; through a 64-bit float it would be rounded twice."""
    double = float(text)
    try:
        (single,) = struct.unpack("<f", struct.pack("<f", double))
    except OverflowError:
        return double * float("inf")
    (bits,) = struct.unpack("<Q", struct.pack("<d", double))
    if bits & 0x1FFF_FFFF != 0x1000_0000:  # not in the middle between two
        return float(single)
    exact, middle = Decimal(text), Decimal(double)
    if exact == middle:
        return float(single)
    (bits,) = struct.unpack("<I", struct.pack("<f", single))
    away = abs(Decimal(single)) > abs(middle)
    if away == (abs(exact) > abs(middle)):
        return float(single)
    (single,) = struct.unpack("<f", struct.pack("<I", bits - 1 if away else bits + 1))
    return float(single)


# What `spark.read.csv` takes for numbers and booleans; `ValueError` for anything else


def whole_of(bits: int) -> Callable[[str], int]:
    """For a type of integers with this number of bits, one of them for the sign."""

    def fit(text: str) -> int:
        if not _WHOLE.fullmatch(text) or max(text) > _LAST_CHAR or not -(1 << bits - 1) <= (number := int(text)) < 1 << bits - 1:
            raise ValueError(text)
        return number

    return fit


_WHOLE = re.compile(r"[+-]?\d{1,1000}")  # digits of any script, as Java has it
_FLOAT = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?")
_NO_NUMBERS = {"Inf": "inf", "-Inf": "-inf", "NaN": "nan", "+NaN": "nan", "-NaN": "nan"}
_NO_NUMBERS |= {"Infinity": "inf", "+Infinity": "inf", "-Infinity": "-inf"}


def csv_float(text: str) -> float:
    return float(_number(text))


def csv_float32(text: str) -> float:
    number = _number(text)
    return float(number) if number[-1] in "fn" else to_float32(number)


def _number(text: str) -> str:
    """As Python writes it; in Java white space may stand around it, and a letter behind it, for its type."""
    trimmed = text.strip(JAVA_SPACE)
    found = _FLOAT.fullmatch(trimmed)
    if found is None and trimmed not in _NO_NUMBERS:
        raise ValueError(text)
    return _NO_NUMBERS[trimmed] if found is None else found[1]


def to_boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"
