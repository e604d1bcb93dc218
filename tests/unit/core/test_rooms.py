"""The rooms of `qewqew_core`, as its `__init__` files and CONTRIBUTING describe them."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "qewqew_core"
# Which any other may import.
TOP = {"arguments", "checksum", "clock", "crc", "errors", "keys", "limits", "references", "secrecy", "urls"}
# What each folder may import of this package, beside these.
ROOMS = {
    "disk": set[str](),
    "formats": set(),
    "batch": {"disk", "formats"},
    "queue": {"batch", "disk", "formats"},
    "topic": {"batch", "disk", "formats"},
    "tools": {"queue", "topic", "batch", "disk", "formats"},
    "cli": {"tools", "queue", "topic", "batch", "disk", "formats"},
}
PUBLIC = {"_replace", "_asdict", "_fields"}  # of named tuples
FILES = {".".join(file.relative_to(PACKAGE).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}
MODULES = {name: ast.parse(file.read_text()) for name, file in FILES.items()}


def imports(module: str) -> set[str]:
    """The names of this package that are imported anywhere in the module."""
    names = set()
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("qewqew_core.") for name in names if name.startswith("qewqew_core.")}


def test_each_room_imports_what_it_may() -> None:
    assert {module.partition(".")[0] for module in MODULES} == {*ROOMS, *TOP, "__init__", "__main__"}
    for module in MODULES:
        room = module.partition(".")[0]
        imported = {name.partition(".")[0] for name in imports(module)}
        if room in TOP:
            assert imported <= TOP, module
        elif room in ROOMS:
            public = {name for name in imported if name[0].isupper() or name == "inspect"} if room == "cli" else set()
            assert imported - public <= ROOMS[room] | {room} | TOP, module


def test_each_room_says_what_lives_there_and_imports_nothing_itself() -> None:
    for room in ROOMS:
        module = MODULES[f"{room}.__init__"]
        assert len(module.body) == 1, room
        assert "may import" in (ast.get_docstring(module) or ""), room


def test_no_module_imports_itself_on_a_detour() -> None:
    """Also not where it is imported for its types alone."""

    def of_ours(name: str) -> set[str]:
        return {module for module in MODULES if module != "__init__" and f"{name}.".startswith(f"{module}.")}

    graph = {module: set[str]().union(*map(of_ours, imports(module))) - {module} for module in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_no_module_uses_a_private_name_of_another() -> None:
    for module, tree in MODULES.items():
        nodes = list(ast.walk(tree))
        own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")}
        used = {part for name in imports(module) for part in name.split(".")}
        for node in nodes:
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
                used.add(node.attr)
        private = {name for name in used - own if name.startswith("_") and not name.startswith("__")}
        assert private <= PUBLIC, module


# Below the seam, or beside it: a bell is nothing that is stored, and a spool goes with its process; a file with a secret, and
# what the command line and the tools work on, are files of the user.
TOUCHES_FILES = ("disk.files", "disk.directories", "disk.descriptors", "disk.bell", "disk.spool", "references", "cli.", "tools.")
OF_OS = {  # what of `os` touches no file that has a name
    *("PathLike", "fspath", "fsencode", "fsdecode", "sep", "SEEK_SET", "urandom", "getpid", "register_at_fork", "stat_result"),
    *("geteuid", "getegid", "getgroups", "path.splitext"),
    *("path.join", "path.basename", "path.dirname", "path.abspath", "path.normpath", "path.relpath", "path.split"),
}


def test_what_touches_files_goes_through_the_seam() -> None:
    for module, tree in MODULES.items():
        if module.startswith(TOUCHES_FILES):
            continue
        nodes = list(ast.walk(tree))
        names = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        of_os = {name.removeprefix("os.") for name in names if re.fullmatch(r"os\.(path\.)?\w+", name)}
        assert of_os <= OF_OS | {"path"}, module
        called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
        assert "open" not in called, module
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not imported & {"shutil", "tempfile", "pathlib", "io.open", "glob", "mmap", "posix", "os.path"}, module
        assert "os" not in {node.module for node in nodes if isinstance(node, ast.ImportFrom)}, module


def test_no_file_is_longer_than_one_reads_at_once() -> None:
    for file in FILES.values():
        assert len(file.read_text().splitlines()) <= 500, file


def test_contributing_has_every_room() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"^\| `(\w+)/`", text, re.MULTILINE)) == set(ROOMS)
