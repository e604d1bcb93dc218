"""The rooms of `qewqew_spark`, as its `__init__` files describe them."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "qewqew_spark"
# Of each folder, and of each module that is in none, what it may import of the others.
ROOMS = {
    "options": set(),
    "codecs": {"options"},
    "source": {"codecs", "options"},
    "sink": {"source.rows", "options"},
    "data_source": {"source", "sink", "options"},
    "tables": set(),
    "jobs": {"data_source", "source.batches", "tables", "options"},
}
JVM = "_j"  # with this begin the names of what PySpark has of Spark's Scala side; there are no others to reach it by


def modules() -> dict[str, ast.Module]:
    files = [file for file in PACKAGE.rglob("*.py") if file.parent != PACKAGE or file.stem != "__init__"]
    return {".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): parsed(file) for file in files}


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports(tree: ast.Module) -> list[str]:
    """What is imported of this package, anywhere in the module."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name.removeprefix("qewqew_spark.") for name in found if name.startswith("qewqew_spark.")]


def test_each_room_imports_what_it_may() -> None:
    assert {name.partition(".")[0] for name in modules()} == set(ROOMS)
    for module, tree in modules().items():
        room = module.partition(".")[0]
        for name in imports(tree):
            assert any(f"{name}.".startswith(f"{may}.") for may in {room, *ROOMS[room]}), f"{module} imports {name}"


def test_no_module_imports_itself_on_a_detour() -> None:
    known = modules()
    graph = {
        module: {max((one for one in known if f"{name}.".startswith(f"{one}.")), key=len) for name in imports(tree)}
        for module, tree in known.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_no_module_uses_a_private_name_of_another() -> None:
    for module, tree in modules().items():
        nodes = list(ast.walk(tree))
        own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        used |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        private = {name for name in used - own if name.startswith("_") and not name.startswith(("__", JVM))}
        assert private <= {"_replace"}, module  # of a named tuple, and public
