"""A daemon without sockets and data: sessions under test, what they answer, and what must always hold."""

from __future__ import annotations

from collections import Counter

from headrace.node import session
from headrace.node.jobs import ClientJob, JobTally
from headrace.node.served import ReadOutcome
from headrace.node.session import Session, WindowBudget
from headrace.node.wire import (
    Ask,
    Buffers,
    DaemonReport,
    Opened,
    ReplyStatus,
    Request,
    Retired,
    Samples,
    Welcome,
    WireError,
    Working,
)
from headrace.plane.batch_trace import NOT_READ

WINDOW, JOB_WINDOW, ROOM = 1000, 1500, 2000
SIZE, SAMPLES = 100, 50
ROUND = 128  # buffers are larger than what is in them
BATCH_MAX = 14


class Memory:
    """A batch in shared memory, of which only the sizes are real."""

    def __init__(self, indices, buffer):
        self.indices = self.labels = self.offsets = self.lengths = indices
        self.data = bytes(min(1, len(indices)))
        self.capacity = -(-max(1, SIZE * len(indices)) // ROUND) * ROUND
        self.shared = (0, buffer, self.capacity) if buffer else None
        self.way = NOT_READ
        self.abandoned = 0

    def abandon(self):
        self.abandoned += 1

    def held(self, ns):
        assert ns >= 0


class Tuning:
    """Counts what is leased, and who uses the data set."""

    held_back = None

    def __init__(self):
        self.leased_bytes, self.sessions = 0, set()

    def join(self, session):
        self.sessions.add(session)

    def leave(self, session):
        self.sessions.discard(session)

    def note(self, session, note):  # noqa: ARG002 - as a plane's
        self.sessions.add(session)


class Data:
    """A data set whose reads end when the test says so."""

    samples_count = SAMPLES
    kept = None  # pictures are not decoded

    def __init__(self, number):
        self.number = number
        self.users = {}
        self.reading = []
        self.part_names = ("",)
        self.tuning = Tuning()

    def slabs(self):
        return []

    def forget(self, holder):
        pass

    def gathered(self, batches, samples, nbytes):
        pass

    def dropped_by(self, holder, identity):
        pass

    def bytes_of(self, indices):
        return SIZE * len(indices)

    def ask(self, indices, done):
        self.reading.append((indices, done))


class Client:
    """A session, what was said to it, and what it answered."""

    def __init__(self, host, number):
        self.answers = []
        self.session = Session(host, number, 0, self.send)
        self.asked = Counter()
        self.answered = Counter()
        self.buffers = set()
        self.replied = Counter()

    def send(self, message, fds=(), owner=None):  # noqa: ARG002 - as the server's
        assert not self.session.closed
        self.answers.append(message)
        match message:
            case Samples():
                self.answered[message.ticket] += 1
                if message.status is ReplyStatus.OK:
                    assert message.buffer in self.buffers  # it came before
            case Buffers():
                assert len(message.buffers) == len(fds)
                new = {number for number, _ in message.buffers}
                assert not new & self.buffers  # once
                self.buffers |= new
            case Retired():
                assert set(message.buffers) <= self.buffers
                self.buffers -= set(message.buffers)
            case Working() | Opened() | DaemonReport() | Welcome():
                self.replied[type(message).__name__] += 1


class Host:
    """What sessions need of the daemon. Opens are answered, and reads end, when the test says so."""

    window_bytes = WINDOW
    rate_limits = None

    def __init__(self, clients=3):
        self.jobs, self.opening, self.stops = {}, [], 0
        self.data = {1: Data(1), 2: Data(2)}
        self.budget = WindowBudget(ROOM)
        self.tally, self.shared = JobTally(), 0
        self.clients = [Client(self, n) for n in range(clients)]

    def job(self, name):
        return self.jobs.setdefault(name, ClientJob(name, JOB_WINDOW, self.tally))

    def share(self):
        self.shared += 1

    def open(self, session, request):
        self.opening.append((session, request.ticket))

    def pump_all(self):
        for client in self.living():
            client.session.pump()

    def describe(self, _asking=None):
        return {}

    def stop(self):
        self.stops += 1

    def living(self):
        return [c for c in self.clients if not c.session.closed]

    def answer_opens(self, *, works=True):
        opening, self.opening = self.opening, []
        for k, (asking, ticket) in enumerate(opening):
            data = self.data[1 + k % 2] if works else None
            asking.opened(ticket, data, ReplyStatus.OK if works else ReplyStatus.NOT_FOUND, "")

    def say(self, client, message: Request):
        """As the server does: a broken rule ends the connection; whether it was kept."""
        session = client.session
        try:
            before = client.answered.total() + len(session.requests)
            session.handle(message)
        except WireError:
            session.close()
            return False
        if isinstance(message, Ask):
            client.asked[message.ticket] += 1
            assert client.answered.total() + len(session.requests) == before + 1
        return True

    def check(self):
        """What always holds."""
        self.what_is_held_adds_up()
        self.windows_hold()
        self.every_ask_gets_one_answer()
        self.nothing_waits_for_nothing()
        self.users_are_who_has_it_open()

    def what_is_held_adds_up(self):
        for client in self.clients:
            s = client.session
            leased = sum(lease.held_bytes for lease in s.leases.values())
            reserved = sum(asked.reserved_bytes for asked in s.requests.values())
            if s.closed:  # what is read for it still is held until it comes
                assert leased == reserved == 0 <= s.held_bytes
            else:
                assert s.held_bytes == leased + reserved >= 0
            assert s.waiting_bytes == sum(asked.indices.nbytes for asked in s.waiting)
            assert all(not asked.reserved_bytes for asked in s.waiting)
        for job in self.jobs.values():
            mine = [c.session.held_bytes for c in self.clients if c.session.job is job]
            assert job.held_bytes == sum(mine) >= 0
        assert self.budget.held_bytes == sum(job.held_bytes for job in self.jobs.values())

    def windows_hold(self):
        """Beyond the window by the rounding of buffers, or by one request that is larger than it."""
        largest = BATCH_MAX * SIZE + ROUND

        def slack(sessions):
            under_way = BATCH_MAX if any(s.closed for s in sessions) else 0
            return ROUND * (under_way + sum(len(s.leases) + len(s.requests) for s in sessions))

        for client in self.clients:
            s = client.session
            assert s.held_bytes <= max(WINDOW, largest) + slack([s])
        for job in self.jobs.values():
            mine = [c.session for c in self.clients if c.session.job is job]
            assert job.held_bytes <= max(JOB_WINDOW, largest) + slack(mine)
        everybody = [client.session for client in self.clients]
        assert self.budget.held_bytes <= max(ROOM, largest) + slack(everybody)

    def every_ask_gets_one_answer(self):
        for client in self.living():
            s = client.session
            for ticket in client.asked:
                assert client.answered[ticket] + (ticket in s.requests) == 1
            assert set(client.answered) <= set(client.asked)

    def nothing_waits_for_nothing(self):
        """Who waits does so because a window that he is under is used by somebody."""
        for client in self.living():
            s = client.session
            if s.waiting:
                size = s.waiting[0].size_bytes
                mine = s.held_bytes and s.held_bytes + size > WINDOW
                jobs = s.job.held_bytes and s.job.held_bytes + size > JOB_WINDOW
                room = self.budget.held_bytes and self.budget.held_bytes + size > ROOM
                assert mine or jobs or room or s.job.reading >= session.READS_MAX
        for job in self.jobs.values():
            assert 0 <= job.reading <= session.READS_MAX
        under_way = sum(len(data.reading) for data in self.data.values())
        assert under_way == sum(job.reading for job in self.jobs.values())

    def users_are_who_has_it_open(self):
        for data in self.data.values():
            sessions_of_jobs = Counter(
                c.session.job.name for c in self.living() if data.number in c.session._data
            )
            assert data.users == dict(sessions_of_jobs)
            mine = {c.session for c in self.living() if data.number in c.session._data}
            assert data.tuning.sessions == mine
            leases = [lease for c in self.living() for lease in c.session.leases.values()]
            held = sum(lease.held_bytes for lease in leases if lease.data is data)
            assert data.tuning.leased_bytes == held

    def hang_up_all(self):
        """Everybody goes; reads that are under way end when nobody is there any more."""
        for client in self.living():
            client.session.close()
        for data in self.data.values():
            for indices, done in data.reading:
                done(ReadOutcome(Memory(indices, 1)))
            data.reading.clear()
            assert data.users == {}
        for job in self.jobs.values():
            assert job.held_bytes == 0
            assert not job.sessions
        assert self.budget.held_bytes == 0
