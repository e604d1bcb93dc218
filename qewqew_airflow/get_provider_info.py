"""What Airflow lists about this provider; the entry point `apache_airflow_provider` names the function."""

from __future__ import annotations

from typing import Any


def get_provider_info() -> dict[str, Any]:
    name = "QewQew"
    return {
        "package-name": "qewqew",  # the normalised name of the distribution, or discovery raises
        "name": name,
        "description": "Durable local queues and topics between Airflow tasks and Spark jobs.",
        "integrations": [{"integration-name": name, "tags": ["software"]}],
        "hooks": [{"integration-name": name, "python-modules": ["qewqew_airflow.hooks.qewqew"]}],
        "operators": [
            {
                "integration-name": name,
                "python-modules": [
                    f"qewqew_airflow.operators.{module}"
                    for module in ("stage", "leases", "process", "publish", "spark_submit", "drain")
                ],
            }
        ],
        "sensors": [{"integration-name": name, "python-modules": ["qewqew_airflow.sensors.qewqew"]}],
        "triggers": [{"integration-name": name, "python-modules": ["qewqew_airflow.triggers.qewqew"]}],
        "queues": ["qewqew_airflow.queues.qewqew.QewQewMessageQueueProvider"],
        "task-decorators": [
            {"name": "qewqew", "class-name": "qewqew_airflow.decorators.qewqew.qewqew_task"},
            {"name": "qewqew_batch", "class-name": "qewqew_airflow.decorators.qewqew.batch_task"},
        ],
        "notifications": ["qewqew_airflow.notifications.qewqew.QewQewNotifier"],
        "extra-links": ["qewqew_airflow.links.qewqew.QewQewLink", "qewqew_airflow.links.qewqew.SparkLink"],
        "asset-uris": [
            {
                "schemes": ["qewqew"],
                "handler": "qewqew_airflow.assets.qewqew.sanitize_uri",
                "factory": "qewqew_airflow.assets.qewqew.create_asset",
                "to_openlineage_converter": "qewqew_airflow.assets.qewqew.convert_asset_to_openlineage",
            }
        ],
        "config": {
            "qewqew": {
                "description": "Settings of QewQew.",
                "options": {
                    "late_after": {
                        "description": "Seconds that the oldest record may wait before the page calls its queue late; 0: never",
                        "version_added": "0.1.0",
                        "type": "float",
                        "example": None,
                        "default": "7200",
                    },
                    "poll_interval": {
                        "description": "Longest pause of a trigger in seconds, if the file system reports no changes",
                        "version_added": "0.1.0",
                        "type": "float",
                        "example": None,
                        "default": "10",
                    },
                },
            }
        },
        "connection-types": [
            {
                "connection-type": "qewqew",
                "hook-class-name": "qewqew_airflow.hooks.qewqew.QewQewHook",
                "hook-name": name,
                "ui-field-behaviour": {
                    "hidden-fields": ["login", "password", "port", "schema"],
                    "relabeling": {"host": "Directory"},
                    "placeholders": {"host": "/var/lib/qewqew"},
                },
                "conn-fields": _connection_fields(),
            }
        ],
    }


def _connection_fields() -> dict[str, Any]:
    """The fields of a connection's form besides the directory: what its extra may hold, see `QewQewHook`."""

    def field(label: str, description: str, kind: str, **schema: int) -> dict[str, Any]:
        return {"label": label, "description": description, "schema": {"type": [kind, "null"], **schema}}

    hostname = "The host that has the directory, as task instances show it; *: every worker sees the same directory"
    directory_id = "The id of the directory, as `qewqew init` printed it; another directory is then refused"
    sync = "commit: a commit is on disk when it returns; never: it survives a kill, but not a power cut"
    records = "How many records may wait in a queue; a task that stages more fails (default: no limit)"
    log_bytes = "Bytes by which a log grows before it is cut back to a snapshot (default 4 MiB)"
    group = "The Unix group whose members share the queues and topics (default: they are for one user alone)"
    topics = "JSON: block_size, max_age, max_records, max_bytes, delete_committed, slow_readers"
    return {
        "hostname": field("Hostname", hostname, "string"),
        "directory_id": field("Directory id", directory_id, "string"),
        "chunk_size": field("Chunk size", "Bytes of one chunk file (default 16 MiB)", "integer", minimum=12, maximum=2**31 - 1),
        "sync": {
            "label": "Sync",
            "description": sync,
            "schema": {"type": "string", "enum": ["commit", "never"], "default": "commit"},
        },
        "lock_timeout": field(
            "Lock time-out", "Seconds to wait for another owner (default 10; to stage 60)", "number", minimum=0
        ),
        "max_records": field("Records", records, "integer", minimum=1),
        "max_bytes": field("Bytes", "How many bytes of records may wait in a queue (default: no limit)", "integer", minimum=1),
        "min_free_bytes": field(
            "Free bytes", "Bytes that staging leaves free on the file system (default 0)", "integer", minimum=0
        ),
        "log_bytes": field("Log bytes", log_bytes, "integer", minimum=1, maximum=2**30),
        "max_attempts": field(
            "Attempts", "Leases of a batch before it goes to the dead letters (default 5)", "integer", minimum=1
        ),
        "retry_delay": field(
            "Retry delay",
            "Seconds until a batch that failed is leased again, doubled each time up to an hour (default 300)",
            "number",
            minimum=0,
        ),
        "retention": field(
            "Retention", "Seconds that acknowledged batches are kept for cleared tasks (default 86400)", "number", minimum=0
        ),
        "retention_bytes": field(
            "Retained bytes", "Bytes of acknowledged batches that are kept (default 1 GiB)", "integer", minimum=0
        ),
        "group": field("Group", group, "string"),
        "topic": field("Topics", topics, "object"),
    }
