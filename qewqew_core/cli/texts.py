"""Numbers and times as people read them."""

from __future__ import annotations

from datetime import UTC, datetime


def counted(number: int, what: str, plural: str | None = None) -> str:
    return f"{number:,} {what if number == 1 else plural or what + 's'}"


def sized(number: float) -> str:
    if number < 1024:
        return f"{number:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        number /= 1024
        if number < 1024:
            return f"{number:.1f} {unit}"
    return f"{number / 1024:,.1f} TiB"


def age(moment: datetime) -> str:
    import pendulum

    return pendulum.instance(moment).diff_for_humans(absolute=True)


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def short(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def iso(moment: datetime | None) -> str | None:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z") if moment else None
