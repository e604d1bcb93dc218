"""What `MessageQueueTrigger(scheme="qewqew", …)` of Airflow's provider common.messaging finds."""

from __future__ import annotations

from typing import Any, NoReturn

from airflow.providers.common.messaging.providers.base_provider import BaseMessageQueueProvider

from qewqew_airflow.triggers.qewqew import QewQewEventTrigger
from qewqew_core import BadArgument


class QewQewMessageQueueProvider(BaseMessageQueueProvider):
    """The arguments besides ``scheme`` are those of `QewQewEventTrigger`."""

    scheme = "qewqew"

    def trigger_class(self) -> type[QewQewEventTrigger]:
        return QewQewEventTrigger

    def queue_matches(self, queue: str) -> bool:
        """True where ``queue`` may be meant for QewQew, to say in `trigger_kwargs` what to write. Other providers take URLs."""
        return queue.startswith("qewqew:") or ":" not in queue

    def trigger_kwargs(self, queue: str, **kwargs: Any) -> NoReturn:
        name = queue.removeprefix("qewqew:").lstrip("/")
        raise BadArgument(
            f"MessageQueueTrigger(queue={queue!r}) is not for QewQew; write MessageQueueTrigger(scheme='qewqew', "
            f"queue_name={name!r}), or topic and reader instead of queue_name"
        )
