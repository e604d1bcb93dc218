"""Checks the words of the documentation and of our packages, and the length of lines in the documentation.

`./run lint` runs it. Add a phrase only if it is wrong nearly everywhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LENGTH = 120
GENERATED = ROOT / "docs" / "benchmarks.md"
INSTEAD = {  # a pattern, and what to write instead
    r"(?<![Tt]here\s)(is|are) no(?! longer| more than)": "is not, has no",
    r"(?<![Tt]here\s)(is|are) none": "is not, has no",
    "[Ww]ho(m)?ever": "anyone who, a task that",
    r"(?<!all\s)(?<!both\s)(?<!most\s)(?<!one\s)(?<!some\s)of which": "whose, or two sentences",
    "for ever": "forever, permanently",
    "[Aa]new": "again, from scratch",
    "in silence": "silently",
    "[Mm]end(s|ed|ing)?": "repair, fix",
    "an own": "its own",
    "[Hh]e|[Hh]is|[Hh]im|[Hh]imself": "you, they",
    "to the letter": "exactly",
    "the (more|less) often the": "two sentences",
    "bears": "has",
    "so many": "this many",
    "shall": "should, will",
    "if one may": "if you may",
    "(is|are|was|were) put right": "repaired",
    "Other than": "unlike",
    "(becomes?|become) of": "happens to",
    "(this|that) very": "the same",
    "in the making": "that is being created",
    "works? off": "works through",
    "made if it is missing": "created",
    r"there \| here": "the names of the two",
    r"\w+\.\x20{2}\w+": "one space",
}


def problems(path: Path) -> Iterator[tuple[int, str]]:
    """The lines to change, and why."""
    text = path.read_text()
    for phrase, instead in INSTEAD.items():
        for found in re.finditer(rf"\b({phrase})\b".replace(" ", r"[\s#]+"), text):
            yield text.count("\n", 0, found.start()) + 1, f"{' '.join(found[0].split())!r}: write {instead}"
    if path.suffix == ".md":
        # What programs print is as long as it is, rows of tables and lone links cannot be wrapped.
        text = re.sub("^```console\n.*?^```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > LENGTH and " " in line.strip() and not line.startswith("|"):
                yield number, f"{len(line)} characters, more than {LENGTH}"


def main() -> int:
    paths = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *(path for kind in ("py", "js", "html") for path in ROOT.glob(f"*qewqew*/**/*.{kind}")),
    ]
    found = [(path, *problem) for path in sorted(paths) if path != GENERATED for problem in problems(path)]
    for path, number, problem in sorted(found):
        print(f"{path.relative_to(ROOT)}:{number}: {problem}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
