"""The Spark job on a batch: its arguments and its result."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from airflow.sdk import ObjectStoragePath

from qewqew_airflow.errors import SparkJobFailed
from qewqew_core import BadArgument
from qewqew_core.references import is_reference, refuse_in_clear
from qewqew_core.secrecy import hide
from qewqew_spark.jobs.output import Output, check_arguments, check_drained

# Parameters here that are arguments of the ready-made job, besides its outputs.
JOB_ARGUMENTS = "codec", "schema", "read_options", "quarantine", "max_bad_records", "schema_evolution", "rescued"


def check_job(outputs: Any, **arguments: Any) -> None:
    """Raise `BadArgument` unless the ready-made job would take these."""
    if not isinstance(outputs, Sequence) or isinstance(outputs, str):
        raise BadArgument(f"outputs must be a list of at least one output, each a dict, not {type(outputs).__name__}")
    parsed = [Output.from_fields(output) for output in outputs]
    if isinstance(read_options := arguments.get("read_options"), Mapping):
        refuse_in_clear("read_options", read_options)
    check_arguments(parsed, **{name: value for name, value in arguments.items() if value is not None})
    try:
        json.dumps(outputs)
    except (TypeError, ValueError) as error:
        raise BadArgument(f"outputs cannot be written as JSON: {error}") from error


def check_drain(outputs: Any) -> None:
    """Raise `BadArgument` unless the drain writes these."""
    check_drained([Output.from_fields(output) for output in outputs])


def with_texts_for_paths(value: Any) -> Any:
    """The same, with paths as Spark takes them. Raises `BadArgument` for one with a connection of Airflow's."""
    if isinstance(value, Mapping):
        return {name: with_texts_for_paths(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(with_texts_for_paths, value)]
    if getattr(value, "conn_id", None):
        raise BadArgument(f"outputs: {value} needs a connection of Airflow's, which Spark does not know; give its URL as text")
    return str(value) if isinstance(value, (os.PathLike, ObjectStoragePath)) else value


def check_settings(conf: Any, ready_made: bool, arguments: Any, others: Mapping[str, Any]) -> None:
    """Raise `BadArgument` for a secret among Spark's settings, the arguments of another application, or what ``others`` say, such
    as URLs of packages; and for a setting that says where its value is, unless the job is the ready-made one, which looks there.
    """
    settings = conf if isinstance(conf, Mapping) else {}
    instead = "" if ready_made else "set it in your application, or name a file that has it in properties_file"
    refuse_in_clear("conf", settings, instead)
    if not ready_made:
        for name in filter(lambda name: is_reference(settings[name]), settings):
            raise BadArgument(f"conf: {name!r} says where its value is, but only the ready-made job looks there; {instead}")
    refuse_in_clear("submit", others, "give it to Spark or Ivy in a file that only the worker's user may read")
    words = [str(each) for each in arguments] if isinstance(arguments, (list, tuple)) else []
    for number, (before, word) in enumerate(zip(["", *words], words, strict=False)):
        named = before if before.startswith("-") and not word.startswith("-") else f"argument {number}"
        for text in {named: word}, {f"argument {number}": f"{before} {word}"}:  # together, for `-u user:password`
            refuse_in_clear("application_args", text, "pass it with env_vars or in a file")


def conf_of(conf: Mapping[str, Any] | None) -> dict[str, Any]:
    """Spark's settings as text: `{"env": …}` as JSON, which the ready-made job reads."""
    return {name: json.dumps(value) if isinstance(value, Mapping) else value for name, value in (conf or {}).items()}


def job_arguments(manifest: str, outputs: Sequence[Mapping[str, Any]], result: str | None, **arguments: Any) -> list[str]:
    """The command line of the ready-made job. ``arguments`` are those of `JOB_ARGUMENTS` that are given."""
    command = [manifest]
    for output in outputs:
        command += ["--output", json.dumps(output)]
    for name, value in arguments.items():
        if name == "read_options":
            for option, text in (value or {}).items():
                command += ["--read-option", f"{option}={text if isinstance(text, str) else json.dumps(text)}"]
        elif value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    if result is not None:
        command += ["--result", result]
    return command


def fill_in(arguments: Sequence[Any], **places: str) -> list[str]:
    """The command line of another application: its ``arguments``, with ``{manifest}`` and the like replaced."""
    pattern = re.compile(r"\{(" + "|".join(places) + r")\}")
    return [pattern.sub(lambda found: places[found[1]], str(argument)) for argument in arguments]


def read_result(path: str) -> dict[str, Any]:
    """The JSON object that the job wrote, or {} if it wrote none. Raises `SparkJobFailed` for anything else."""
    try:
        with open(path, "rb") as file:
            result = json.load(file)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SparkJobFailed(f"the job's result is not JSON: {error}", path=path) from error
    if not isinstance(result, dict):
        raise SparkJobFailed("the job's result is not a JSON object", path=path)
    return result


def snapshots(report: Mapping[str, Any]) -> dict[str, Any]:
    """The snapshots that the job has made in tables of Iceberg and Delta, as ``snapshots``, if it has made some."""
    found = [output for output in report.get("outputs", ()) if output.get("snapshot")]
    return {"snapshots": {output["table"] or output["path"]: output["snapshot"] for output in found}} if found else {}


def last_error(output: str) -> str:
    """Why spark-submit failed, in one line: what the ready-made job printed last, or the last error in the output."""
    lines = output.splitlines()
    ours = [line for line in lines if line.startswith("qewqew: error: ")]
    named = [line for line in lines if re.match(r"(Caused by: )?[\w.$]*(Error|Exception): \S", line)]
    return hide((ours or named or lines[:1] or ["no output"])[-1].removeprefix("qewqew: error: "))[:1000]


def ui_of(line: str, host: str) -> str | None:
    """The address of Spark's UI, if this line of spark-submit's output has it: for a driver on this ``host``, or an
    application in YARN.
    """
    if found := re.search(r"Successfully started service 'SparkUI' on port (\d+)", line):
        return f"http://{host}:{found[1]}"
    found = re.search(r"tracking URL: (https?://[^\s<>\"']+)", line)
    return None if found is None else found[1]
