"""Tensor point-to-point: sends and receives of one group, matched by sender, receiver and tag, in
the order of posting.

A send is done when its receive has taken the data, never before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pytest_smp.ranks.sim.rank_context import RankContext
from smp_core.transport import messages
from smp_core.transport.memory import InFlightBuffer
from smp_core.transport.peers import ANY, Source
from smp_core.transport.protocols import Group
from smp_core.transport.stack_frames import Place


class Post:
    """One posted send or receive.

    An Operation of the scheduler. Ranks are positions in the group.
    """

    __slots__ = (
        "context",
        "done",
        "group",
        "in_flight",
        "mailbox",
        "me",
        "peer",
        "place",
        "source",
        "tag",
        "tensor",
        "value",
        "verb",
    )

    def __init__(
        self,
        context: RankContext,
        group: Group,
        verb: str,
        me: int,
        peer: Source,
        tag: int,
        tensor: torch.Tensor,
        in_flight: InFlightBuffer,
        place: Place | None,
    ) -> None:
        self.context, self.group, self.verb = context, group, verb
        self.me, self.peer, self.tag, self.tensor, self.place = me, peer, tag, tensor, place
        self.in_flight = in_flight
        self.value: torch.Tensor | None = None  # of a receive: the received tensor
        self.source: Source = peer  # of a receive that is done: the sender
        self.mailbox: Mailbox | None = None  # where it waits for a match
        self.done = False

    @property
    def hint(self) -> str | None:
        """A likely mistake if a receive waits in vain: its tag is not that of the sends; None for a send."""
        if self.mailbox is None or self.verb == "send":
            return None
        ranks = self.group.ranks
        sent = [
            (ranks[send.me], send.tag)
            for send in self.mailbox.sent_to(self.me)
            if self.peer in (ANY, send.me)
        ]
        return messages.tag_hint(ranks[self.me], self.tag, sent)

    def text(self) -> str:
        """The call in words."""
        peer = None if self.peer is ANY else self.group.ranks[self.peer]
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        shape = list(self.tensor.shape)
        return messages.post_text(self.verb == "send", peer, dtype, shape, self.tag)

    def describe(self, rank: int) -> str:
        """See Operation."""
        return f"{self.text()} [group {messages.group_text(self.group.name, self.group.ranks)}]"

    def missing(self, rank: int) -> Sequence[int]:
        """See Operation."""
        if self.peer is ANY:
            return [each for each in self.group.ranks if each != rank]
        return (self.group.ranks[self.peer],)

    def issued(self, rank: int) -> Place | None:
        """The line that posted the send or the receive."""
        return self.place

    def give_up(self, rank: int) -> None:
        """See TensorOperation."""
        if self.mailbox is not None:
            self.mailbox.remove(self)

    def values(self, rank: int) -> list[torch.Tensor]:
        """The values that the rank gets, once the post is done: one for a receive, none for a send."""
        return [] if self.value is None else [self.value]


def _fit(one: Post, other: Post) -> bool:
    send, receive = (one, other) if one.verb == "send" else (other, one)
    return receive.peer in (ANY, send.me) and receive.tag == send.tag


class Mailbox:
    """The posts of one group that have not been matched, oldest first, by receiver."""

    def __init__(self, size: int) -> None:
        self._sends: list[list[Post]] = [[] for _ in range(size)]
        self._receives: list[list[Post]] = [[] for _ in range(size)]

    def post(self, new: Post) -> None:
        """Match ``new`` with the oldest post that fits, or keep it.

        Raises CollectiveMismatchError, which ends the run, if dtype or number of elements differ.
        """
        if new.verb == "send":
            assert new.peer is not ANY
            candidates, own = self._receives[new.peer], self._sends[new.peer]
        else:
            candidates, own = self._sends[new.me], self._receives[new.me]
        fitting = [other for other in candidates if _fit(new, other)]
        if not fitting:
            new.mailbox = self
            own.append(new)
            return
        other = fitting[0]
        if new.peer is ANY:  # whichever sender's came first; in the order of each sender
            first = {each.me: each for each in reversed(fitting)}
            senders = sorted(first, key=lambda me: fitting.index(first[me]))
            other = first[senders[new.context.scheduler.decide(len(senders))]]
        candidates.remove(other)
        self._deliver(new, *((new, other) if new.verb == "send" else (other, new)))

    def _deliver(self, new: Post, send: Post, receive: Post) -> None:
        if (
            send.tensor.dtype != receive.tensor.dtype
            or send.tensor.numel() != receive.tensor.numel()
        ):
            what = "dtype" if send.tensor.dtype != receive.tensor.dtype else "element count"
            made = [(post.context.rank, post.text(), post.place) for post in (send, receive)]
            error = messages.post_mismatch(
                messages.group_text(new.group.name, new.group.ranks), what, *made
            )
            new.context.scheduler.fail(new.context.thread_state, error)
            raise error
        (receive.value,) = send.in_flight.inputs
        receive.source = send.me
        for post in (send, receive):
            post.done = True
            post.context.scheduler.wake(post.context.rank, post)

    def remove(self, post: Post) -> None:
        """Forget a post that nothing has matched."""
        for posts in (*self._sends, *self._receives):
            if post in posts:
                posts.remove(post)

    def sent_to(self, receiver: int) -> list[Post]:
        """The sends to a member that nothing has matched."""
        return self._sends[receiver]

    def unmatched(self) -> list[Post]:
        """Posts that nothing has matched."""
        return [post for posts in (*self._sends, *self._receives) for post in posts]
