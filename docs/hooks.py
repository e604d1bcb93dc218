"""What the site has from outside docs/: README.md is its first page, and links between it and docs/ lead there.

And what its API page leaves out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from griffe import Class, Extension, Function, Parameters
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = {"README.md": "index.md"} | {name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=(root / source).read_text().replace("](docs/", "](")))
    for example in root.glob("dags_examples/*.py"):
        files.append(File.generated(config, f"dags_examples/{example.name}", content=example.read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    up = "../" * page.file.src_uri.count("/")  # from the page to docs/; one more leads to the files beside it
    return markdown.replace(f"]({up}../", f"]({up}")


class OnlyPublic(Extension):
    """Leaves out the parameters that begin with ``_``, and the attributes that an ``__init__`` sets without a word."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        func.parameters = Parameters(*(one for one in func.parameters if not one.name.startswith("_")))

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        for name, member in list(cls.members.items()):
            set_in_init = member.is_attribute and member.labels == {"instance-attribute"} and member.value is not None
            if set_in_init and not member.docstring:
                del cls.members[name]
