"""What an error of Spark, of the JVM or of a Python worker says, in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JJavaError
from pyspark.errors import (
    AnalysisException,
    ArithmeticException,
    DateTimeException,
    IllegalArgumentException,
    PySparkException,
)

from qewqew_core.errors import BadArgument, BadManifest, Corrupt, QewQewError
from qewqew_core.secrecy import hide

# Classes of SQL's states: a feature that is not supported, wrong data, an error of syntax or analysis.
_WRONG = re.compile(r"SQLSTATE: (?:0A|22|42)")
# Raised by a data source in Python for its own reasons, or by a metastore that may be back at the next try, and that does not
# refuse what Hive has no name or type for.
_OF_OTHERS = re.compile(r"SQLSTATE: 38|HiveException(?!: Unable to alter table)|MetaException|TTransportException")
_MISTAKES = AnalysisException, ArithmeticException, DateTimeException, IllegalArgumentException, ValueError
# What a writer says of its options and of the place. Other failures of a write may be gone with the next try.
_OF_WRITER = re.compile(
    r"\[OPTION_|java\.lang\.NumberFormatException|ParentNotDirectoryException|No FileSystem for scheme|Class \S+ not found"
)

_DAMAGE = re.compile(r"qewqew_core\.errors\.(?:Corrupt|BadManifest): ")
_FRONT = re.compile(
    r"(?:\S*SparkException: Job aborted .*? executor \w+\): )?(?:[a-z0-9]+\.)+[A-Z]\w+: "
)  # that tell a user nothing


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """What Spark cannot parse, analyse or take for a value within is the fault of ``what``: raise `BadArgument`."""
    try:
        yield
    except QewQewError:
        raise
    except (PySparkException, Py4JJavaError, ValueError) as error:
        mistaken = isinstance(error, _MISTAKES) or _WRONG.search(explain(error))
        if not mistaken or _OF_OTHERS.search(str(error)):
            raise
        raise BadArgument(f"{what}: {explain(error)}") from error


@contextmanager
def blamed_write(what: str) -> Iterator[None]:
    """The same for a write to ``what``, where wrong rows, and a disk or service that fails, are not its fault."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        mistaken = isinstance(error, AnalysisException | IllegalArgumentException) or _OF_WRITER.search(str(error))
        if not mistaken or _OF_OTHERS.search(str(error)):
            raise
        raise BadArgument(f"{what}: {_FRONT.sub('', explain(error))}") from error


def is_damage(error: BaseException | None) -> bool:
    """Whether the error, or one that it comes from, is that the bytes of a batch are damaged: here or in a task of Spark."""
    while error is not None:
        if isinstance(error, (Corrupt, BadManifest)) or _DAMAGE.search(str(error)):
            return True
        error = error.__cause__
    return False


def explain(error: BaseException) -> str:
    """The one line of an error that says what happened, out of the traces around it, without secrets."""
    return hide(_explained(error))


def _explained(error: BaseException) -> str:
    text = str(error).strip()
    if isinstance(error, Py4JJavaError):
        text = text.partition("\n: ")[2] or text
    if isinstance(error, QewQewError) or not text:
        return " ".join((text or repr(error)).split("\n"))
    if ours := re.findall(r"qewqew_core\.errors\.\w+: (.+)", text):  # raised in one of Spark's Python processes
        return str(ours[-1])
    head, mark, trace = text.partition("Traceback (most recent call last):")
    if mark:
        lines = [line for line in trace.partition("\n\tat ")[0].split("\n") if line.strip() and "SQLSTATE" not in line]
        return f"{' '.join(head.split())} {lines[-1].strip()}".strip() if lines else text.split("\n")[0]
    causes = re.findall(r"^Caused by: (.+)", text, re.MULTILINE)
    first = text.split("\n")[0].rstrip(";")
    return first if not causes or causes[-1] in first else f"{first} (caused by {causes[-1]})"
