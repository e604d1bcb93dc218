"""Records that are one map in msgpack each."""

from __future__ import annotations

from typing import Any

from pyspark.sql import types

from qewqew_core.errors import BadArgument
from qewqew_spark.codecs import objects
from qewqew_spark.codecs.objects import Fit, ObjectCodec, Unreadable
from qewqew_spark.options import Options

try:
    import msgpack
except ImportError:
    msgpack = None


class MsgpackCodec(ObjectCodec):
    """See `Codec`. Timestamps are msgpack's own (extension -1). There are no dates, and the only decimal numbers are
    integers.
    """

    def __init__(self, fields: types.StructType, options: Options) -> None:
        if msgpack is None:
            raise BadArgument(
                "the codec msgpack needs the package msgpack, on the driver and the executors: install qewqew[msgpack]"
            )
        super().__init__(fields, _load, [objects.fit_of(field.dataType, field.name, _fit) for field in fields])


def _load(data: bytes) -> dict[str, Any]:
    try:
        # Lengths are checked against the record's; no map key but text and bytes.
        value = msgpack.unpackb(data, raw=False, strict_map_key=True, timestamp=0)
    except msgpack.ExtraData as error:
        raise Unreadable("more than one msgpack value") from error
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise Unreadable("malformed msgpack") from error
    if not isinstance(value, dict):
        raise Unreadable("not a msgpack map")
    return value


def _fit(kind: types.DataType, where: str) -> Fit:
    if isinstance(kind, types.DecimalType):
        return objects.decimal(kind.precision, kind.scale)
    if isinstance(kind, types.TimestampType):
        return _moment
    if type(kind) not in objects.SCALARS:
        raise BadArgument(
            f"the field {where}: msgpack has no {kind.simpleString().upper()}; read the type that was written, and convert it"
        )
    return objects.SCALARS[type(kind)]


def _moment(value: Any) -> int:
    """Microseconds since the epoch; nanoseconds are cut off."""
    if not isinstance(value, msgpack.Timestamp):
        raise TypeError(value)
    return int(objects.whole(64)(value.seconds * 1_000_000 + value.nanoseconds // 1000))
