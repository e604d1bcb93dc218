"""What `MessageQueueTrigger(scheme="qewqew", …)` of Airflow's provider common.messaging finds."""

from __future__ import annotations

from airflow.providers.common.messaging.providers.base_provider import BaseMessageQueueProvider

from qewqew_airflow.triggers.qewqew import QewQewEventTrigger


class QewQewMessageQueueProvider(BaseMessageQueueProvider):
    """Its other arguments are those of `QewQewEventTrigger`."""

    scheme = "qewqew"

    def trigger_class(self) -> type[QewQewEventTrigger]:
        return QewQewEventTrigger
