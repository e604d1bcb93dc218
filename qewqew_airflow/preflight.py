"""``python -m qewqew_airflow.preflight CONNECTION``: whether tasks of this connection can run on this host, as this user.

Airflow's own `connections test` asks the same, where ``[core] test_connection`` allows it, but not for Spark.
"""

from __future__ import annotations

import argparse
import os
import sys

from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_core.tools.preflight import of_spark


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each answer. Returns 0, or 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m qewqew_airflow.preflight", description="Can tasks of a connection run here?")
    parser.add_argument("connection", help="id of a connection of type qewqew")
    parser.add_argument("--spark", action="store_true", help="also look for spark-submit and Java")
    parser.add_argument("--triggerer", action="store_true", help="say what to do of a triggerer, not of a worker")
    given = parser.parse_args(arguments)
    os.environ["_AIRFLOW_PROCESS_CONTEXT"] = "server"  # as Airflow's own commands: connections in the database, too
    answers = QewQewHook(given.connection, in_triggerer=given.triggerer).preflight()
    answers += of_spark() if given.spark else []
    for answer in answers:
        print("ok   " if answer.ok else "WRONG", f"{answer.what}: {answer.text}")
    return 0 if all(answer.ok for answer in answers) else 1


if __name__ == "__main__":
    sys.exit(main())
