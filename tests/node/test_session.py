"""Session under any sequence of messages: what is held adds up, every ask gets one answer."""

import contextlib
from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.node.room import Room
from headrace.node.served import Outcome
from headrace.node.session import Job, Session
from headrace.node.wire import (
    PROTOCOL,
    Abandon,
    Ask,
    Buffers,
    Hello,
    Hurry,
    Open,
    Opened,
    Release,
    Report,
    Retired,
    Samples,
    Status,
    StatusAsked,
    StopAsked,
    Welcome,
    WireError,
    Working,
)

WINDOW, JOB_WINDOW, ROOM = 1000, 1500, 2000
SIZE, SAMPLES = 100, 50
ROUND = 128  # buffers are larger than what is in them

tickets = st.integers(1, 30)
indices = st.lists(st.integers(0, SAMPLES - 1), max_size=14)
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


class Memory:
    """A batch in shared memory, of which only the sizes are real."""

    def __init__(self, indices, buffer):
        self.indices = self.labels = self.offsets = self.lengths = indices
        self.data = bytes(min(1, len(indices)))
        self.capacity = -(-max(1, SIZE * len(indices)) // ROUND) * ROUND
        self.shared = (0, buffer, self.capacity) if buffer else None
        self.abandoned = 0

    def abandon(self):
        self.abandoned += 1


class Data:
    """A data set whose reads end when the test says so."""

    samples_count = SAMPLES

    def __init__(self, number):
        self.number = number
        self.users = {}
        self.reading = []

    def bytes_of(self, indices):
        return SIZE * len(indices)

    def ask(self, indices, done):
        self.reading.append((indices, done))


class Client:
    """A session, what was said to it, and what it answered."""

    def __init__(self, host, number):
        self.said = []
        self.session = Session(host, number, 0, self.send)
        self.asked = Counter()
        self.answered = Counter()
        self.buffers = set()
        self.replied = Counter()

    def send(self, message, fds=(), owner=None):  # noqa: ARG002 - as `Send` has it
        assert not self.session.closed
        self.said.append(message)
        match message:
            case Samples():
                self.answered[message.ticket] += 1
                if message.status is Status.OK:
                    assert message.buffer in self.buffers  # it came before
            case Buffers():
                assert len(message.buffers) == len(fds)
                new = {number for number, _ in message.buffers}
                assert not new & self.buffers  # once
                self.buffers |= new
            case Retired():
                assert set(message.buffers) <= self.buffers
                self.buffers -= set(message.buffers)
            case Working() | Opened() | Report() | Welcome():
                self.replied[type(message).__name__] += 1


class Sessions(RuleBasedStateMachine):
    """Three clients of two jobs, over two data sets."""

    window_bytes = WINDOW

    @property
    def sessions(self):
        return [client.session for client in self.clients]

    # -- what a session needs of the daemon --------------------------------------------------------

    def job(self, name):
        return self.jobs.setdefault(name, Job(name, JOB_WINDOW))

    def open(self, session, request):
        self.opening.append((session, request.ticket))

    def pump_all(self):
        for session in self.sessions:
            if not session.closed:
                session.pump()

    def report(self):
        return b"{}"

    def stop(self):
        self.stops += 1

    # -- rules -------------------------------------------------------------------------------------

    @initialize()
    def begin(self):
        self.jobs, self.opening, self.stops, self.buffer = {}, [], 0, 0
        self.data = {1: Data(1), 2: Data(2)}
        self.batches = []
        self.room = Room(ROOM)
        self.clients = [Client(self, n) for n in range(3)]
        for client, job in zip(self.clients, "aab", strict=True):
            client.session.handle(Hello(PROTOCOL, job))
            assert client.said[-1].status is Status.OK
            client.session.handle(Open(1, b"/data", 1, "", [""], None))
        self.answer_opens(True)

    def say(self, client, message):
        """As the server does: a broken rule ends the connection."""
        session = client.session
        try:
            before = client.answered.total() + len(session._asked)
            session.handle(message)
        except WireError:
            session.close()
            return False
        if isinstance(message, Ask):
            client.asked[message.ticket] += 1
            assert client.answered.total() + len(session._asked) == before + 1
        return True

    def living(self):
        return [c for c in self.clients if not c.session.closed]

    @rule(number=st.integers(0, 2), message=messages)
    def anything(self, number, message):
        client = self.clients[number]
        if not client.session.closed:
            self.say(client, message)

    @rule(
        number=st.integers(0, 2), indices=indices, data=st.integers(1, 2), give_back=st.booleans()
    )
    def ask_properly(self, number, indices, data, give_back):
        """So that there are long lives too."""
        client = self.clients[number]
        session = client.session
        if session.closed:
            return
        released = list(session.leases)[:2] if give_back else []
        ticket = session._last_ticket + 1
        wire = np.array(indices, np.int64).tobytes()
        assert self.say(client, Ask(ticket, data, wire, released)) == (data in session._data)

    @rule(number=st.integers(0, 2), abandon=st.booleans())
    def give_back(self, number, abandon):
        client = self.clients[number]
        if not client.session.closed:
            leases = list(client.session.leases)[:3]
            assert self.say(client, Abandon(leases) if abandon else Release(leases))

    @rule(number=st.integers(0, 2))
    def hurry_what_waits(self, number):
        """It can be answered by nobody but the client itself: it must be told."""
        client = self.clients[number]
        session = client.session
        if session.closed or not session.waiting:
            return
        ticket = session._waiting[0].ticket
        assert self.say(client, Hurry(ticket))
        assert client.answered[ticket] == 1
        assert client.said[-1].status is Status.BUSY

    @rule(number=st.integers(0, 2))
    def open_one(self, number):
        client = self.clients[number]
        if not client.session.closed:
            self.say(client, Open(client.session._last_ticket + 1, b"/data", 1, "", [""], None))

    @rule(works=st.booleans())
    def answer_opens(self, works):
        opening, self.opening = self.opening, []
        for k, (session, ticket) in enumerate(opening):
            data = self.data[1 + k % 2] if works else None
            session.opened(ticket, data, Status.OK if works else Status.NOT_FOUND, "")

    @precondition(lambda self: any(d.reading for d in self.data.values()))
    @rule(draw=st.data(), ends=st.sampled_from(["well", "well", "failed", "unshared"]))
    def a_read_ends(self, draw, ends):
        data = draw.draw(st.sampled_from([d for d in self.data.values() if d.reading]))
        at = draw.draw(st.integers(0, len(data.reading) - 1))
        indices, done = data.reading.pop(at)
        if ends == "failed":
            done(Outcome(None, "it failed"))
            return
        self.buffer += 1
        memory = Memory(indices, self.buffer if ends == "well" else 0)
        self.batches.append(memory)
        done(Outcome(memory))

    @rule(number=st.integers(0, 2))
    def hang_up(self, number):
        if not self.clients[number].session.closed:
            self.clients[number].session.close()

    @rule()
    def retire(self):
        for client in self.living():
            client.session.retire(range(1, self.buffer + 1, 2))

    # -- what always holds -------------------------------------------------------------------------

    @invariant()
    def what_is_held_adds_up(self):
        for client in self.clients:
            s = client.session
            leased = sum(lease.held_bytes for lease in s.leases.values())
            reserved = sum(asked.reserved_bytes for asked in s._asked.values())
            assert s.held_bytes == leased + reserved >= 0
            assert s._waiting_bytes == sum(asked.indices.nbytes for asked in s._waiting)
            assert all(not asked.reserved_bytes for asked in s._waiting)
        for job in self.jobs.values():
            assert job.held_bytes == sum(s.held_bytes for s in job.sessions) >= 0
        assert self.room.held_bytes == sum(job.held_bytes for job in self.jobs.values())

    @invariant()
    def windows_hold(self):
        """Beyond the window by the rounding of buffers, or by one request that is larger than it."""
        largest = 14 * SIZE + ROUND
        for client in self.clients:
            s = client.session
            slack = ROUND * (len(s.leases) + len(s._asked))
            assert s.held_bytes <= max(WINDOW + slack, largest + slack)
        for job in self.jobs.values():
            assert job.held_bytes <= max(JOB_WINDOW, largest) + ROUND * sum(
                len(s.leases) + len(s._asked) for s in job.sessions
            )

    @invariant()
    def every_ask_gets_one_answer(self):
        for client in self.living():
            s = client.session
            for ticket in client.asked:
                assert client.answered[ticket] + (ticket in s._asked) == 1
            assert set(client.answered) <= set(client.asked)

    @invariant()
    def nothing_waits_for_nothing(self):
        """Who waits does so because his window or his job's is used by somebody."""
        for client in self.living():
            s = client.session
            if s.waiting:
                size = s._waiting[0].size_bytes
                mine = s.held_bytes and s.held_bytes + size > WINDOW
                jobs = s.job.held_bytes and s.job.held_bytes + size > JOB_WINDOW
                room = self.room.held_bytes and self.room.held_bytes + size > ROOM
                assert mine or jobs or room

    @invariant()
    def users_are_who_has_it_open(self):
        for data in self.data.values():
            found = Counter(
                c.session.job.name for c in self.living() if data.number in c.session._data
            )
            assert data.users == dict(found)

    def teardown(self):
        if not hasattr(self, "clients"):
            return
        for client in self.living():
            client.session.close()
        for data in self.data.values():
            for indices, done in data.reading:  # they end when nobody is there any more
                with contextlib.suppress(KeyError):
                    done(Outcome(Memory(indices, 1)))
            assert data.users == {}
        for job in self.jobs.values():
            assert job.held_bytes == 0
            assert not job.sessions
        # Memory of who is gone is never used again, nor is it given up twice.
        assert all(batch.abandoned <= 1 for batch in self.batches)


Sessions.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestSessions = Sessions.TestCase
