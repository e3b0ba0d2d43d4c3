"""The destinations of messages on arrival: matched with receives (mailbox), or gathered for the n-th
collective call (meetings).
"""

from __future__ import annotations

from collections.abc import Iterable

from smp_core.transport.mpi.messenger import (
    Buffer,
    Message,
    Messenger,
    Outgoing,
    channel_key,
    note_bytes,
)
from smp_core.transport.peers import ANY, Source


class Receive:
    """A posted receive. Ranks are world ranks."""

    __slots__ = ("message", "number", "source")

    def __init__(self, source: Source, number: int) -> None:
        self.source, self.number = source, number
        self.message: Message | None = None

    def fits(self, message: Message) -> bool:
        """Return whether the receive may take this message."""
        return self.source in (ANY, message.source) and self.number == message.number

    @property
    def done(self) -> bool:
        """True if the receive's message is here."""
        return self.message is not None and self.message.ready


class MpiMailbox:
    """Messages that are sent to be received, matched by source and number, in the order of sending
    and of posting.

    A send is done when its receive has taken it, never before.
    """

    def __init__(self, messenger: Messenger, name: str) -> None:
        self._messenger, self._key = messenger, channel_key(name)
        self._arrived: list[Message] = []
        self._posted: list[Receive] = []
        messenger.open(self._key, self)

    def send(self, dest: int, number: int, payload: Buffer, note: str = "") -> Outgoing:
        """Send to a world rank."""
        return self._messenger.send(dest, self._key, number, payload, note, receipt=True)

    def receive(self, source: Source, number: int) -> Receive:
        """Post a receive from a world rank, or from ANY."""
        receive = Receive(source, number)
        with self._messenger.lock:
            message = next((each for each in self._arrived if receive.fits(each)), None)
            if message is None:
                self._posted.append(receive)
            else:
                self._arrived.remove(message)
                self._match(receive, message)
        return receive

    def deliver(self, message: Message) -> None:
        """See Receiver."""
        receive = next((each for each in self._posted if each.fits(message)), None)
        if receive is None:
            self._arrived.append(message)
        else:
            self._posted.remove(receive)
            self._match(receive, message)

    def _match(self, receive: Receive, message: Message) -> None:
        receive.message = message
        self._messenger.acknowledge(message)


class Gathering:
    """The messages of one number: one from each of some ranks."""

    __slots__ = ("_missing", "_note", "_strange", "_unready", "messages")

    def __init__(self, sources: Iterable[int], note: str) -> None:
        self._note = note_bytes(note)
        self.messages: dict[int, Message] = {}
        self._missing = set(sources)
        self._unready: list[Message] = []  # their payloads are on their way
        self._strange: Message | None = None  # says something else than this rank

    def add(self, message: Message) -> None:
        """A message of this number has come."""
        self.messages[message.source] = message
        self._missing.discard(message.source)
        if not message.ready:
            self._unready.append(message)
        if message.note != self._note and self._strange is None:
            self._strange = message

    @property
    def complete(self) -> bool:
        """True if no more messages are to come."""
        return not self._missing

    @property
    def done(self) -> bool:
        """True if all messages are here, or one that does not belong to them."""
        if self._unready:
            self._unready = [message for message in self._unready if not message.ready]
        return not (self._missing or self._unready) or self._strange is not None

    @property
    def strange(self) -> tuple[int, str] | None:
        """The rank that makes another call at this number, and that call."""
        if self._strange is None:
            return None
        return self._strange.source, self._strange.note.decode()


class Meetings:
    """The collective calls of one group: the n-th of one member meets the n-th of every other."""

    def __init__(self, messenger: Messenger, name: str) -> None:
        self._messenger, self._key = messenger, channel_key(name)
        self._open: dict[int, Gathering] = {}
        self._early: dict[int, list[Message]] = {}
        self._count = 0
        self.lock = messenger.lock
        messenger.open(self._key, self)

    def number(self) -> int:
        """The number of this member's next call."""
        self._count += 1
        return self._count

    def send(self, dest: int, number: int, payload: Buffer, note: str) -> Outgoing:
        """Bring something for a member, by its world rank."""
        return self._messenger.send(dest, self._key, number, payload, note)

    def expect(self, number: int, sources: Iterable[int], note: str) -> Gathering:
        """The messages that members, by their world ranks, send to this one in the call ``number``."""
        gathering = Gathering(sources, note)
        with self._messenger.lock:
            for message in self._early.pop(number, ()):
                gathering.add(message)
            if not gathering.complete:
                self._open[number] = gathering
        return gathering

    def deliver(self, message: Message) -> None:
        """See Receiver."""
        gathering = self._open.get(message.number)
        if gathering is None:
            self._early.setdefault(message.number, []).append(message)
            return
        gathering.add(message)
        if gathering.complete:
            del self._open[message.number]
