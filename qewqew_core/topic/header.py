"""The header that index and readers of zbus have: fields that the application may set."""

from __future__ import annotations

from abc import ABC, abstractmethod

from qewqew_core.formats import zbus
from qewqew_core.formats.zbus import Common


class HasHeader(ABC):
    """The methods of topics and readers for their header. What they set is durable when they return."""

    @abstractmethod
    def _common(self) -> Common:
        """What the file says."""

    @abstractmethod
    def _patch(self, at: int, data: bytes) -> None:
        """Write into the file, durably."""

    def header(self) -> Common:
        """Mask, times (milliseconds since the epoch), creator and the four extension texts."""
        return self._common()

    def set_mask(self, mask: int) -> None:
        """The 32 bits that zbus servers keep there: see `zbus`. In a reader, `zbus.DELETE_ON_EXIT` makes it temporary: it is
        deleted with its last consumer.
        """
        self._patch(*zbus.mask_patch(mask))

    def set_creator(self, text: str | None) -> None:
        """At most 127 bytes of UTF-8, or `BadArgument`."""
        self._patch(*zbus.creator_patch(text))

    def set_extension(self, number: int, text: str | None) -> None:
        """One of four texts (``number`` 0 to 3) for the application; at most 127 bytes of UTF-8, or `BadArgument`."""
        self._patch(*zbus.ext_patch(number, text))
