"""The plugin: a page in Airflow's UI, Browse -> QewQew. The entry point `airflow.plugins` names the class."""

from __future__ import annotations

from typing import Any

from airflow.plugins_manager import AirflowPlugin

PREFIX = "/qewqew"


class QewQewPlugin(AirflowPlugin):
    name = "qewqew"
    # The link is relative, so it also works behind a URL prefix.
    external_views = [  # noqa: RUF012
        {"name": "QewQew", "href": f"{PREFIX[1:]}/page", "destination": "nav", "category": "browse", "url_route": "qewqew"}
    ]

    @property
    def fastapi_apps(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Every process of Airflow loads this plugin, but only the API server asks for this, so only it imports FastAPI."""
        from qewqew_airflow.page.app import app

        return [{"app": app, "url_prefix": PREFIX, "name": "QewQew"}]
