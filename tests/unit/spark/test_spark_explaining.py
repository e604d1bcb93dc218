"""Which errors of Spark are a mistake of the user's, with which another try would not help."""

from __future__ import annotations

import pytest
from pyspark.errors import AnalysisException, IllegalArgumentException, SparkRuntimeException

from qewqew_core.errors import BadArgument
from qewqew_spark.jobs.explaining import blamed, blamed_write

FAILED = "Job aborted due to stage failure: Lost task 0.0 (TID 8) (host executor 1): "


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (AnalysisException("[UNSUPPORTED_DATA_TYPE] no"), "output: [UNSUPPORTED_DATA_TYPE] no"),
        (IllegalArgumentException("[CODEC_NOT_AVAILABLE] no"), "output: [CODEC_NOT_AVAILABLE] no"),
        (SparkRuntimeException(f"{FAILED}java.lang.NumberFormatException: x"), "output: "),
        (SparkRuntimeException(f"org.apache.spark.SparkException: {FAILED}java.lang.NumberFormatException: x"), "output: x"),
    ],
)
def test_what_a_writer_does_not_take_is_blamed_on_the_output(error, told):
    with pytest.raises(BadArgument) as caught, blamed_write("output"):
        raise error
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    "error",
    [
        SparkRuntimeException("[DIVIDE_BY_ZERO] in a row"),
        SparkRuntimeException(f"{FAILED}java.io.IOException: No space left on device"),
        AnalysisException("org.apache.hadoop.hive.ql.metadata.HiveException: Unable to instantiate the client"),
        AnalysisException("[PYTHON_DATA_SOURCE_ERROR] the checksum is wrong SQLSTATE: 38000"),
    ],
)
def test_what_may_be_gone_with_the_next_try_is_nobodys_fault(error):
    with pytest.raises(type(error)), blamed_write("output"):
        raise error
    if isinstance(error, AnalysisException):
        with pytest.raises(AnalysisException), blamed("a query"):
            raise error
