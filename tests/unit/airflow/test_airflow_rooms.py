"""The rooms of `qewqew_airflow`, as its `__init__` files describe them."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "qewqew_airflow"
TOP = {"arguments", "errors", "keys"}  # which any other may import
# Of each folder, and of each module that is in none, what else it may import of this package.
ROOMS = {
    **{name: set[str]() for name in TOP},
    "hooks": set(),
    "shared": {"hooks"},
    "assets": {"hooks", "shared"},
    "links": set(),
    "operators": {"hooks", "shared", "assets", "links"},
    "triggers": {"hooks", "shared"},
    "sensors": {"hooks", "shared", "links", "triggers"},
    "notifications": {"hooks", "shared"},
    "decorators": {"operators"},
    "queues": {"triggers"},
    "page": {"hooks", "shared"},
    "plugin": {"page"},
    "preflight": {"hooks"},
    "get_provider_info": set(),
}
PUBLIC = {"_replace"}  # of a named tuple
# Of Airflow's SparkSubmitHook, which has no public names for what is checked before a batch is leased, or for its output.
OF_AIRFLOW = {
    "_connection",
    "_is_yarn_cluster_mode",
    "_process_spark_submit_log",
    "_validate_track_driver_via_k8s_api_config",
    "_validate_yarn_track_via_rm_api_config",
}
FILES = {".".join(file.relative_to(PACKAGE).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}
MODULES = {name: ast.parse(file.read_text()) for name, file in FILES.items()}


def imports(module: str, package: str = "qewqew_airflow") -> set[str]:
    """The names below ``package`` that are imported anywhere in the module."""
    names = set()
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix(f"{package}.") for name in names if name.startswith(f"{package}.")}


def test_each_room_imports_what_it_may() -> None:
    assert {module.partition(".")[0] for module in MODULES} == {*ROOMS, "__init__"}
    for module in MODULES:
        room = module.partition(".")[0]
        imported = {name.partition(".")[0] for name in imports(module)}
        if module.endswith("__init__"):  # every process of Airflow imports it
            assert not imported, module
        else:
            assert imported <= ROOMS[room] | {room} | (TOP - {room} if room not in TOP else set()), module


def test_each_room_says_what_it_may_import() -> None:
    for room in (module.removesuffix(".__init__") for module in MODULES if module.endswith(".__init__")):
        said = (ast.get_docstring(MODULES[f"{room}.__init__"]) or "").partition("May import")[2]
        assert set(re.findall(r"`(\w+)`", said)) == ROOMS[room], room


def test_no_module_imports_itself_on_a_detour() -> None:
    def of_ours(name: str) -> set[str]:
        return {module for module in MODULES if f"{name}.".startswith(f"{module}.")}

    TopologicalSorter({module: set().union(*map(of_ours, imports(module))) for module in MODULES}).prepare()  # raises CycleError


def test_no_module_uses_a_private_name_of_another() -> None:
    for module, tree in MODULES.items():
        nodes = list(ast.walk(tree))
        own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        imported = imports(module) | imports(module, "qewqew_core") | imports(module, "qewqew_spark")
        used = {part for name in imported for part in name.split(".")}
        for node in nodes:
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
                used.add(node.attr)
        private = {name for name in used - own if name.startswith("_") and not name.startswith("__")}
        assert private <= OF_AIRFLOW | PUBLIC, module


def test_no_file_is_longer_than_one_reads_at_once() -> None:
    for file in PACKAGE.rglob("*"):
        if file.suffix in (".py", ".js", ".css", ".html"):
            assert len(file.read_text().splitlines()) <= 500, file
