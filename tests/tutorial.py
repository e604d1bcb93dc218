"""The DAG files of docs/tutorial.md, by name."""

from __future__ import annotations

import re
from pathlib import Path

_TEXT = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text()
FILES = dict(re.findall(r"^`\$AIRFLOW_HOME/dags/(\w+\.py)`:\n\n```python\n(.*?)^```$", _TEXT, re.MULTILINE | re.DOTALL))
