"""Coverage-guided fuzzing of everything that parses bytes from disk: python tests/fuzz/fuzz.py TARGET [libFuzzer options].

TARGET is one of split, chain, log, manifest, topic_log, reader_log, topic, request. Needs atheris (of the dev group). Starts from
`corpus/TARGET`; new inputs go into the first directory given, for example::

    mkdir -p .cache/fuzz/log
    .venv/bin/python tests/fuzz/fuzz.py log .cache/fuzz/log -max_total_time=600
    .venv/bin/python tests/fuzz/minimize.py log .cache/fuzz/log

The last line puts what covers more than the corpus does into the corpus. An input that breaks a property is written to
crash-… in the present directory; `fuzz.py TARGET crash-…` runs it alone.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent))
with atheris.instrument_imports(include=["qewqew_core"]):
    import fuzz_targets


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in fuzz_targets.TARGETS:
        sys.exit(__doc__)
    target = sys.argv.pop(1)
    fuzz_targets.use_private_directory()
    logging.disable(logging.WARNING)  # a target would warn of each input
    options = [f"-max_len={fuzz_targets.MAX_BYTES}", "-timeout=10", "-rss_limit_mb=1024", "-print_final_stats=1"]
    reruns = any(Path(argument).is_file() for argument in sys.argv[1:])
    seeds = [] if reruns else [str(fuzz_targets.CORPUS / target)]
    atheris.Setup([sys.argv[0], *options, *sys.argv[1:], *seeds], fuzz_targets.TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
