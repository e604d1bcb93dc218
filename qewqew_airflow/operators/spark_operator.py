"""An operator that submits a ready-made job to Spark: what those that lease and those that drain have in common."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.providers.common.compat.sdk import AirflowException, AirflowNotFoundException
from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret
from airflow.utils.net import get_hostname

from qewqew_airflow import errors
from qewqew_airflow.arguments import is_rendered_later, read_arguments, whole
from qewqew_airflow.links.qewqew import SparkLink
from qewqew_airflow.operators import spark_job
from qewqew_airflow.operators.spark_worker import end_with
from qewqew_airflow.shared.masking import masked
from qewqew_core import BadArgument
from qewqew_core.references import refuse_in_clear
from qewqew_core.secrecy import secrets_of
from qewqew_core.tools.spark import check_java, find_spark_submit, ready_made_job

if TYPE_CHECKING:
    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
    from airflow.sdk import Context

# The name of jobs that are not given one.
_ARGUMENTS = inspect.signature(SparkSubmitOperator.__init__).parameters
DEFAULT_NAME = _ARGUMENTS["name"].default
TEXTS = [
    name for name, each in _ARGUMENTS.items() if str(each.annotation) in ("str", "str | None")
]  # all are on the command line


class SparkJobOperator(SparkSubmitOperator):
    """Submits the job ``job`` of `qewqew_spark.jobs`, or an application of the user's, and returns what it reports."""

    job = "batch.py"
    template_fields: Sequence[str] = (*SparkSubmitOperator.template_fields, "outputs", *spark_job.JOB_ARGUMENTS)
    template_fields_renderers = {"outputs": "json", "schema": "sql", "read_options": "json"}  # noqa: RUF012  (as Airflow declares it)
    checks: ClassVar[dict[str, Callable[[str, Any], Any]]] = {"max_bad_records": functools.partial(whole, low=0)}

    def __init__(
        self,
        *,
        outputs: Sequence[Mapping[str, Any]] | None = None,
        codec: str | None = None,
        schema: str | None = None,
        read_options: Mapping[str, Any] | None = None,
        quarantine: str | None = None,
        max_bad_records: int | str | None = None,
        schema_evolution: str | None = None,
        rescued: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if self.name == DEFAULT_NAME:
            self.name = (self.conf or {}).get("spark.app.name") or "{{ ti.dag_id }}.{{ ti.task_id }}"
        self.outputs = outputs
        self.codec = codec
        self.schema = schema
        self.read_options = read_options
        self.quarantine = quarantine
        self.max_bad_records: Any = max_bad_records
        self.schema_evolution = schema_evolution
        self.rescued = rescued
        self._killed = False
        self._tell_ui: Callable[[str], None] | None = None
        self._last_lines: deque[str] = deque(maxlen=100)  # of spark-submit's output
        self._driver_is_here = True
        self._result: dict[str, Any] = {}
        self._ready_made = not self.application

    def on_kill(self) -> None:
        """Kill the driver. The user who stopped the task decides whether it runs again."""
        self._killed = True
        self._kill_driver()

    def _kill_driver(self) -> None:
        if self._hook is not None:
            super().on_kill()

    def _written(self) -> Sequence[Mapping[str, Any]]:
        """The outputs, as far as it is known with what was written."""
        return self._result.get("outputs") or self.outputs or ()

    # Before anything is changed: check what can be checked.

    def _check_job(self) -> None:
        read_arguments(self, self.checks)
        self.outputs = spark_job.with_texts_for_paths(self.outputs)
        spark_job.check_settings(self.conf, self._ready_made, self.application_args, self._texts())
        if self._ready_made and not any(
            is_rendered_later(getattr(self, name)) for name in ("outputs", *spark_job.JOB_ARGUMENTS) if name != "quarantine"
        ):
            spark_job.check_job(self.outputs, **self._job_arguments())

    def _texts(self) -> dict[str, Any]:
        return {name: getattr(self, name, getattr(self, f"_{name}", None)) for name in TEXTS}

    def _check_worker(self) -> None:
        try:
            BaseHook.get_connection(self._conn_id)
        except AirflowNotFoundException as error:
            raise errors.SparkConnectionMissing(
                f"connection {self._conn_id!r} does not exist, so Airflow would submit to YARN; add it with type spark and the "
                "master as its host, for example local[*], spark://host:7077 or yarn"
            ) from error
        if self._ready_made:
            self.application = ready_made_job(self.job)
        # A hook only to look at: the hook of the submission takes its arguments when it is made.
        connection = self._get_hook()._connection
        master = connection["master"]
        if not master or master.endswith("://"):
            raise errors.SparkConnectionMissing(
                f"connection {self._conn_id!r} does not name a Spark master; set its host, for example to local[*] or spark://host:7077"
            )
        refuse_in_clear(f"connection {self._conn_id!r}", {"host": master}, "Spark's masters take none")
        if master.startswith(("yarn", "k8s")):
            told = "Airflow passes env_vars to YARN and Kubernetes that way; set it in the environment of the worker"
            refuse_in_clear("env_vars", self.env_vars or {}, told)
        for name, value in (self.env_vars or {}).items():
            for secret in secrets_of(name, value):
                mask_secret(secret)
        environment = {**os.environ, **(self.env_vars or {})}
        self._spark_binary = find_spark_submit(connection["spark_binary"], environment)
        check_java(environment)
        self._check_durable()
        # In cluster mode the driver runs elsewhere, perhaps without this Python and without access to a file for the result.
        self._driver_is_here = connection["deploy_mode"] != "cluster"
        if self._driver_is_here and "PYSPARK_PYTHON" not in environment:
            self.env_vars = {**(self.env_vars or {}), "PYSPARK_PYTHON": sys.executable}

    def _check_durable(self) -> None:
        """Settings that the provider refuses only when it submits, or with which it keeps no driver's id."""
        if not hasattr(self, "durable"):  # a provider before 6.3, which submits again
            return
        hook = self._get_hook()
        if self._track_driver_via_k8s_api:
            hook._validate_track_driver_via_k8s_api_config()
        if hook._is_yarn_cluster_mode:
            if self.durable and not self._yarn_track_via_rm_api:
                raise BadArgument(
                    "in YARN's cluster mode give yarn_track_via_rm_api=True, or durable=False, with which a retry submits again"
                )
            hook._validate_yarn_track_via_rm_api_config()

    # Submit.

    def _run(self, context: Context, what: str, arguments: Callable[[str], list[str]]) -> dict[str, Any]:
        """Submit the job on ``what``, with the ``arguments`` for a file that takes its result; returns that."""
        if self._killed:  # before spark-submit ran, so on_kill could not stop it
            raise AirflowException("killed before spark-submit")
        with tempfile.TemporaryDirectory(prefix="qewqew-") as directory:  # mode 0700
            result = os.path.join(directory, "result.json")
            self.conf = spark_job.conf_of(self.conf)
            self.application_args = arguments(result)
            start = time.monotonic()
            self._last_lines.clear()
            self._tell_ui = functools.partial(SparkLink().tell, context["ti"])
            self.log.info("::group::Spark on %s", what)  # Airflow's page of the log folds what follows
            try:
                super().execute(context)
            except (AirflowException, RuntimeError) as error:  # the latter from a driver elsewhere
                output = str(error)
                if output.startswith("Cannot execute") and "\n" not in output:  # a provider before 6.3 does not add the output
                    output = "\n".join([output, *self._last_lines])
                reason = spark_job.last_error(output)
                self._after_all(context, result, reason)
                failure = errors.SparkJobFailed(f"{what}: {reason}{self._advice(reason)}")
                if self._ready_made and reason.startswith("BadArgument: "):
                    raise errors.fails_at_once(failure, errors.AGAIN) from error
                raise failure from error
            finally:
                self.log.info("::endgroup::")
            report: dict[str, Any] = masked(spark_job.read_result(result))
        self.log.info("Spark finished %s in %.1f s: %s", what, time.monotonic() - start, json.dumps(report))
        return report

    def _arguments(self, source: str, result: str) -> list[str]:
        """The command line of the ready-made job."""
        place = result if self._driver_is_here else None
        return spark_job.job_arguments(source, self.outputs or (), place, **self._job_arguments())

    def _advice(self, reason: str) -> str:
        """What to add to the reason of a failure."""
        return ""

    def _after_all(self, context: Context, result: str, reason: str) -> None:
        """Called when spark-submit has failed; the file ``result`` may be there nevertheless."""

    def _forget_driver(self, context: Context) -> None:
        known = context.get("task_state_store")
        if known is not None and self.durable:  # or the cleared task would take that job for its own
            known.delete(self.external_id_key)
            known.delete(self._K8S_DRIVER_STATUS_KEY)

    def _job_arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in spark_job.JOB_ARGUMENTS}

    def _get_hook(self) -> SparkSubmitHook:
        hook = super()._get_hook()
        process = hook._process_spark_submit_log
        hook._process_spark_submit_log = lambda itr: process(map(self._heard, itr))  # type: ignore[method-assign]
        if hook._connection["deploy_mode"] != "cluster":
            # A driver that outlives a killed task would write the batch at the same time as the retry.
            end = functools.partial(end_with, os.getpid())
            # Spark keeps rows in local directories, as the umask says.
            private: dict[str, Any] = {"umask": 0o077} if self._ready_made else {}
            hook.submit = functools.partial(hook.submit, preexec_fn=end, **private)  # type: ignore[method-assign]
        return hook

    def _heard(self, line: str) -> str:
        """Look at a line that spark-submit prints. The first that has the address of Spark's UI makes the link."""
        self._last_lines.append(line.rstrip())
        if self._tell_ui is not None and (url := spark_job.ui_of(line, os.environ.get("SPARK_PUBLIC_DNS") or get_hostname())):
            tell, self._tell_ui = self._tell_ui, None
            try:
                tell(url)
            except Exception as error:  # only a link
                self.log.warning("The link to Spark's UI at %s could not be made: %s", url, error)
        return line
