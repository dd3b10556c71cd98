"""Session under any sequence of messages: what is held adds up, every ask gets one answer."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.node import session
from headrace.node.served import ReadOutcome
from headrace.node.wire import (
    PROTOCOL,
    Abandon,
    Ask,
    Hello,
    Hurry,
    Note,
    Open,
    Release,
    ReplyStatus,
    StatusAsked,
    StopAsked,
)
from node.fake_host import BATCH_MAX, SAMPLES, Host, Memory

READS_MAX = 5

tickets = st.integers(1, 30)
indices = st.lists(st.integers(0, SAMPLES - 1), max_size=BATCH_MAX)
batches = st.one_of(
    indices.map(lambda i: np.array(i, np.int64).tobytes()),
    st.lists(st.integers(-2, SAMPLES + 1), max_size=3).map(
        lambda i: np.array(i, np.int64).tobytes()
    ),
    st.binary(max_size=20),
)
messages = st.one_of(
    st.builds(Ask, tickets, st.integers(0, 3), batches, st.lists(tickets, max_size=2)),
    st.builds(Hurry, tickets),
    st.builds(Release, st.lists(tickets, max_size=3)),
    st.builds(Abandon, st.lists(tickets, max_size=2)),
    st.builds(StatusAsked, tickets),
    st.builds(StopAsked, tickets),
    st.just(Hello(PROTOCOL, "a")),
)


class Sessions(RuleBasedStateMachine):
    """Three clients of two jobs, over two data sets."""

    # -- rules -------------------------------------------------------------------------------------

    @initialize()
    def begin(self):
        self.host, self.batches, self.buffer = Host(), [], 0
        for client, job in zip(self.host.clients, "aab", strict=True):
            client.session.handle(Hello(PROTOCOL, job))
            assert client.answers[-1].status is ReplyStatus.OK
            client.session.handle(Open(1, b"/data", 1, "", [""], None))
        self.host.answer_opens()

    @rule(number=st.integers(0, 2), message=messages)
    def anything(self, number, message):
        client = self.host.clients[number]
        if not client.session.closed:
            self.host.say(client, message)

    @rule(
        number=st.integers(0, 2), indices=indices, data=st.integers(1, 2), give_back=st.booleans()
    )
    def ask_properly(self, number, indices, data, give_back):
        """So that there are long lives too."""
        client = self.host.clients[number]
        mine = client.session
        if mine.closed:
            return
        released = list(mine.leases)[:2] if give_back else []
        ticket = mine._last_ticket + 1
        wire = np.array(indices, np.int64).tobytes()
        assert self.host.say(client, Ask(ticket, data, wire, released)) == (data in mine._data)

    @rule(number=st.integers(0, 2), abandon=st.booleans())
    def give_back(self, number, abandon):
        client = self.host.clients[number]
        if not client.session.closed:
            leases = list(client.session.leases)[:3]
            assert self.host.say(client, Abandon(leases) if abandon else Release(leases))

    @rule(number=st.integers(0, 2))
    def hurry_what_waits(self, number):
        """It can be answered by nobody but the client itself: it must be told."""
        client = self.host.clients[number]
        mine = client.session
        if mine.closed or not mine.waiting:
            return
        ticket = mine.waiting[0].ticket
        assert self.host.say(client, Hurry(ticket))
        if mine.job.reading >= READS_MAX:
            assert client.answers[-1].status is ReplyStatus.WORKING
            return
        assert client.answered[ticket] == 1
        assert client.answers[-1].status is ReplyStatus.BUSY

    @rule(number=st.integers(0, 2))
    def open_one(self, number):
        client = self.host.clients[number]
        if not client.session.closed:
            self.host.say(
                client, Open(client.session._last_ticket + 1, b"/data", 1, "", [""], None)
            )

    @rule(works=st.booleans())
    def answer_opens(self, works):
        self.host.answer_opens(works=works)

    @precondition(lambda self: any(d.reading for d in self.host.data.values()))
    @rule(draw=st.data(), ends=st.sampled_from(["well", "well", "failed", "unshared"]))
    def a_read_ends(self, draw, ends):
        data = draw.draw(st.sampled_from([d for d in self.host.data.values() if d.reading]))
        at = draw.draw(st.integers(0, len(data.reading) - 1))
        indices, done = data.reading.pop(at)
        if ends == "failed":
            done(ReadOutcome(None, "it failed"))
            return
        self.buffer += 1
        memory = Memory(indices, self.buffer if ends == "well" else 0)
        self.batches.append(memory)
        done(ReadOutcome(memory))

    @rule(number=st.integers(0, 2))
    def hang_up(self, number):
        if not self.host.clients[number].session.closed:
            self.host.clients[number].session.close()

    @rule(number=st.integers(0, 2))
    def hurry_the_last(self, number):
        """Others of its own stand before it: if none of them is read, none will go by itself."""
        client = self.host.clients[number]
        mine = client.session
        if mine.closed or len(mine.waiting) < 2 or mine.job.reading >= READS_MAX:
            return
        ticket = mine.waiting[-1].ticket
        read = any(asked.reserved_bytes for asked in mine.requests.values())
        assert self.host.say(client, Hurry(ticket))
        assert client.answers[-1].status is (ReplyStatus.WORKING if read else ReplyStatus.BUSY)

    @rule()
    def retire(self):
        for client in self.host.living():
            client.session.retire(range(1, self.buffer + 1, 2))

    # -- what always holds -------------------------------------------------------------------------

    @invariant()
    def all_holds(self):
        if hasattr(self, "host"):
            self.host.check()

    def teardown(self):
        if hasattr(self, "host"):
            self.host.hang_up_all()
            # Memory of who is gone is never used again, nor is it given up twice.
            assert all(batch.abandoned <= 1 for batch in self.batches)


@pytest.fixture(autouse=True, scope="module")
def _few_reads():
    """So few that some wait for others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "READS_MAX", READS_MAX)
        yield


Sessions.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestSessions = Sessions.TestCase


def test_a_consumer_that_asks_for_nothing_leaves_the_planes_that_it_told():
    """Its workers ask, each as a client of its own."""
    host = Host(clients=2)
    worker, consumer = (client.session for client in host.clients)
    for client in (worker, consumer):
        client.handle(Hello(PROTOCOL, "a"))
    worker.handle(Open(1, b"/data", 1, "", [""], None))
    host.answer_opens()
    consumer.handle(Note(0.0, 0.0, 0.0, 1.0, 1, 8, 800, 0))
    assert host.data[1].tuning.sessions == {worker, consumer}
    consumer.close()
    assert host.data[1].tuning.sessions == {worker}
