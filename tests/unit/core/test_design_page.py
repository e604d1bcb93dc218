"""docs/design.md names functions for each step of a commit: they exist, and a commit has one place where it becomes true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def defined() -> set[str]:
    """``Class.method`` and ``module.function`` of our packages, by name."""
    names = set[str]()
    for package in ("qewqew_core", "qewqew_spark"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef):
                    names.add(f"{path.stem}.{node.name}")
                elif isinstance(node, ast.ClassDef):
                    names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


def test_every_function_that_the_design_names_exists() -> None:
    named = set(re.findall(r"\b([A-Za-z_]+\.[a-z_]+)\b(?=`| ──)", (ROOT / "docs" / "design.md").read_text()))
    named -= {name for name in named if name.endswith((".py", ".md"))}
    assert len(named) > 35
    assert named <= defined()
