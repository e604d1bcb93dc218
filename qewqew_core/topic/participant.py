"""`Participant`: a reader's part in a session of its topic, which commits in two phases. The log of the topic decides.

The reader notes durably which messages a session will commit (`prepare`). Then the topic's log says that the session was
committed. Then the reader notes that (`resolve`). If a process dies after the first note, the next one looks into the topic's
log.
"""

from __future__ import annotations

from qewqew_core.errors import CommitConflict
from qewqew_core.formats.zbus import Message
from qewqew_core.topic.deliveries import Deliveries
from qewqew_core.topic.reader_state import Prepare, Resolve, Unprepare
from qewqew_core.topic.shared_log import Consumer, SharedLog


class Participant:
    """The part of one `Reader` object."""

    def __init__(self, shared: SharedLog, consumer: Consumer, deliveries: Deliveries) -> None:
        self.engine = shared.engine
        self._shared = shared
        self._consumer = consumer
        self._deliveries = deliveries

    def prepare(self, session: str, messages: list[Message]) -> None:
        """Note durably, whatever ``sync`` is, that the topic's log will decide about these messages. Raises `CommitConflict`."""
        with self.engine.exclusive():
            offsets = self._deliveries.check_mine(tuple(messages)) if messages else []
            if len(offsets) + len(self._consumer.has_passed(messages)) < len(messages):
                raise CommitConflict("a message of the session was committed already. Nothing was changed", path=self.engine.path)
            position = self._shared.commit(Prepare(session, offsets)) if offsets else self.engine.log.position
        self._shared.durable(position, always=True)

    def unprepare(self, session: str) -> None:
        """The session was not committed, and goes on."""
        with self.engine.exclusive():
            if self.engine.state.of_session(session):
                self._shared.commit(Unprepare(session))
                self._consumer.due = 0

    def resolve(self, session: str) -> bool:
        """Note that the session was committed; returns whether that worked. If the disk is full, it is noted later."""
        self._shared.decided.append(session)
        with self.engine.exclusive():  # which notes it
            return session not in self._shared.decided

    def leave_open(self, session: str) -> None:
        """It is unknown whether the session was committed: nothing that it read may be given back or committed."""
        with self.engine.lock:
            for offset in self.engine.state.of_session(session):
                self._consumer.mine.pop(offset, None)

    def requeue(self, messages: list[Message]) -> None:
        """The session was rolled back: what this consumer still has is delivered again."""
        with self.engine.exclusive():
            mine = self._consumer.mine
            offsets = [message.offset for message in messages if mine.get(message.offset) == message.attempt]
            self._deliveries.requeue(offsets)
            self._consumer.due = 0

    def resolve_all(self, committed: set[str]) -> None:
        """Decide the sessions of processes that died while they committed. The caller has the lock of the topic's writer."""
        with self.engine.exclusive():
            for session in {flight.session for flight in self.engine.state.in_flight.values() if flight.session is not None}:
                self._shared.commit(Resolve(session, session in committed))
            self._shared.durable(self.engine.log.position, always=True)

    def is_undecided(self) -> bool:
        """Whether a process died while it committed a session, so that the topic's log must decide."""
        with self.engine.exclusive():
            flights = self.engine.state.in_flight.values()
            owners = {flight.owner for flight in flights if flight.session is not None} - {self._consumer.owner}
            return not all(map(self._shared.lives, owners))
