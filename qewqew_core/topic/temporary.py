"""Temporary readers whose consumers have died. They must not hold blocks back forever."""

from __future__ import annotations

import logging

from qewqew_core.errors import BadPath, Corrupt
from qewqew_core.topic import reader_files, reader_inspection
from qewqew_core.topic.open_topic import OpenTopic
from qewqew_core.topic.reader import open_again
from qewqew_core.topic.topic_inspection import names_of_readers

_logger = logging.getLogger(__name__)


def remove_temporary(topic: OpenTopic) -> None:
    """Delete those that nobody has. One whose log does not say that it is temporary stays, and is named in the log."""
    for name in names_of_readers(topic.files, topic.path):
        if reader_files.is_temporary(topic.files, topic.path, name):
            try:
                reader_inspection.check_temporary(topic.files, topic.path, name)
                # Closing deletes it if nobody else has it. Its consumer may just have done so: then this one is not to stay.
                open_again(topic, name, temporary=True).close()
            except (BadPath, Corrupt) as error:  # it is told to who opens it, and keeps nobody from appending
                _logger.warning("reader %s, which says that it is temporary, could not be removed: %s", name, error)
