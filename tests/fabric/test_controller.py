"""The controller's answers, command by command; no sockets."""

import struct
import uuid
from types import SimpleNamespace

import pytest

from headrace.fabric.command import (
    PROPERTY_DWORDS,
    Admin,
    Cc,
    ControllerIdentity,
    Csts,
    DiscoveryEntry,
    Fabrics,
    LogPage,
    NamespaceIdentity,
    Property,
    Sqe,
    Status,
    fabrics_command,
    unpack_active_namespaces,
    unpack_discovery_log,
)
from headrace.fabric.controller import Association, Controller

NAMESPACES = {
    1: SimpleNamespace(identity=NamespaceIdentity(1000, 512, uid=uuid.UUID(int=5))),
    7: SimpleNamespace(identity=NamespaceIdentity(2000, 512, uid=uuid.UUID(int=6))),
}
DNR = 0x4000


def make(*, enabled=True, kato_ms=0, discovery=None):
    association = Association(
        hostnqn="nqn.2026-11.io.example:h", hostid=bytes(16), subnqn="nqn.2026-11.io.example:s",
        serial="serial", cntlid=3, kato_ms=kato_ms,
        namespaces=dict if discovery else lambda: NAMESPACES, discovery=discovery,
    )  # fmt: skip
    controller = Controller(association, 100.0)
    if enabled:
        assert ask(controller, set_property(Property.CC, Cc.EN)).status == 0
    return controller


def ask(controller, sqe, now_s=100.0):
    return controller.handle(sqe, now_s)


def set_property(offset, value, attributes=0):
    return fabrics_command(Fabrics.PROPERTY_SET, PROPERTY_DWORDS.pack(attributes, offset, value))


def get_property(offset, attributes=0):
    return fabrics_command(Fabrics.PROPERTY_GET, PROPERTY_DWORDS.pack(attributes, offset, 0))


def identify(cns, nsid=0, length=4096):
    return Sqe(Admin.IDENTIFY, nsid=nsid, sgl_type=0x5A, sgl_length=length, cdw10=cns)


def log(page, nbytes, offset=0, rae=0):
    dwords = nbytes // 4 - 1
    return Sqe(
        Admin.GET_LOG_PAGE, sgl_type=0x5A, sgl_length=nbytes,
        cdw10=page | rae << 15 | (dwords & 0xFFFF) << 16, cdw11=dwords >> 16, cdw12=offset,
    )  # fmt: skip


def test_properties_and_enabling():
    controller = make(enabled=False)
    cap = ask(controller, get_property(Property.CAP, 1)).result
    assert cap & 0xFFFF == 1023
    assert cap >> 37 & 1
    assert ask(controller, get_property(Property.VS)).result == 0x10400
    assert ask(controller, get_property(Property.CSTS)).result == 0
    ask(controller, set_property(Property.CC, 0x460001))
    assert ask(controller, get_property(Property.CSTS)).result == Csts.RDY
    assert ask(controller, get_property(Property.CC)).result == 0x460001
    ask(controller, set_property(Property.CC, 0))
    assert ask(controller, get_property(Property.CSTS)).result == 0


def test_shutdown_is_complete_at_once():
    controller = make()
    ask(controller, set_property(Property.CC, Cc.EN | Cc.SHN_NORMAL))
    assert (
        ask(controller, get_property(Property.CSTS)).result & Csts.SHST_MASK == Csts.SHST_COMPLETE
    )
    assert ask(controller, identify(1)).status == Status.COMMAND_SEQUENCE_ERROR | DNR


@pytest.mark.parametrize(
    ("offset", "attributes"), [(Property.CAP, 0), (Property.VS, 1), (0x40, 0), (2, 0)]
)
def test_properties_that_are_not_there(offset, attributes):
    assert ask(make(), get_property(offset, attributes)).status == Status.INVALID_FIELD | DNR


@pytest.mark.parametrize(
    ("offset", "attributes"), [(Property.CAP, 1), (Property.CSTS, 0), (Property.CC, 1)]
)
def test_properties_that_cannot_be_set(offset, attributes):
    assert ask(make(), set_property(offset, 1, attributes)).status == Status.INVALID_FIELD | DNR


def test_nothing_but_fabrics_commands_before_enabling():
    controller = make(enabled=False)
    for sqe in (
        identify(1),
        log(LogPage.SMART, 512),
        Sqe(Admin.KEEP_ALIVE),
        Sqe(Admin.ASYNC_EVENT),
    ):
        assert ask(controller, sqe).status == Status.COMMAND_SEQUENCE_ERROR | DNR


def test_identify_controller():
    found = ControllerIdentity.unpack(ask(make(), identify(1)).data)
    assert (found.cntlid, found.subnqn, found.kind) == (3, "nqn.2026-11.io.example:s", 1)
    assert found.ioccsz == 4
    assert found.namespaces >= max(NAMESPACES)


def test_identify_namespaces():
    controller = make()
    assert unpack_active_namespaces(ask(controller, identify(2)).data) == [1, 7]
    assert unpack_active_namespaces(ask(controller, identify(2, nsid=1)).data) == [7]
    found = NamespaceIdentity.unpack(ask(controller, identify(0, nsid=7)).data)
    assert found == NAMESPACES[7].identity
    assert found.write_protected
    inactive = NamespaceIdentity.unpack(ask(controller, identify(0, nsid=2)).data)
    assert inactive.blocks == 0


def test_identify_descriptors_name_nguid_uuid_and_command_set():
    data = ask(make(), identify(3, nsid=1)).data
    assert data[:20] == bytes((2, 16, 0, 0)) + uuid.UUID(int=5).bytes
    assert data[20:40] == bytes((3, 16, 0, 0)) + uuid.UUID(int=5).bytes
    assert data[40:46] == bytes((4, 1, 0, 0, 0, 0))


@pytest.mark.parametrize(
    "sqe",
    [identify(0x1C), identify(6), identify(0), identify(3, nsid=2), identify(2, nsid=0xFFFFFFFF)],
    ids=["cns", "cns6", "nsid0", "descriptors", "list"],
)
def test_identify_that_is_refused(sqe):
    assert ask(make(), sqe).status == Status.INVALID_FIELD | DNR


def test_a_buffer_of_another_size_is_refused():
    assert ask(make(), identify(1, length=512)).status == Status.SGL_LENGTH_INVALID | DNR


def test_log_pages():
    controller = make()
    supported = ask(controller, log(LogPage.SUPPORTED, 1024)).data
    assert [n for n in range(256) if supported[n * 4]] == [0, 1, 2, 4]
    assert ask(controller, log(LogPage.ERROR, 64)).data == bytes(64)
    assert len(ask(controller, log(LogPage.SMART, 512)).data) == 512
    assert ask(controller, log(LogPage.DISCOVERY, 1024)).status == Status.INVALID_LOG_PAGE | DNR
    assert ask(controller, log(0xC0, 512)).status == Status.INVALID_LOG_PAGE | DNR
    assert ask(controller, log(LogPage.SMART, 512, offset=516)).status == Status.INVALID_FIELD | DNR
    assert ask(controller, log(LogPage.SMART, 512, offset=2)).status == Status.INVALID_FIELD | DNR


def test_features():
    controller = make()
    assert (
        ask(controller, Sqe(Admin.SET_FEATURES, cdw10=7, cdw11=3 | 7 << 16)).result == 3 | 3 << 16
    )
    assert (
        ask(controller, Sqe(Admin.SET_FEATURES, cdw10=7, cdw11=500 | 500 << 16)).result
        == 63 | 63 << 16
    )
    ask(controller, Sqe(Admin.SET_FEATURES, cdw10=0xF, cdw11=7000))
    assert ask(controller, Sqe(Admin.GET_FEATURES, cdw10=0xF)).result == 7000
    assert ask(controller, Sqe(Admin.SET_FEATURES, cdw10=0x84)).status == Status.INVALID_FIELD | DNR


@pytest.mark.parametrize("opcode", [0x00, 0x01, 0x05, 0x0D, 0x10, 0x80, 0x84, 0xC0])
def test_other_admin_commands_are_refused(opcode):
    assert ask(make(), Sqe(opcode)).status == Status.INVALID_OPCODE | DNR


def test_a_changed_namespace_is_told_once_until_the_log_was_read():
    controller = make()
    ask(controller, Sqe(Admin.SET_FEATURES, cdw10=0xB, cdw11=1 << 8))
    for cid in (40, 41):
        assert ask(controller, Sqe(Admin.ASYNC_EVENT, cid=cid)) is None
    controller.namespace_changed(7)
    controller.namespace_changed(9)
    told = controller.completed_events()
    assert [(c.cid, c.result) for c in told] == [(40, 0x040002)]
    page = ask(controller, log(LogPage.CHANGED_NAMESPACES, 4096, rae=1)).data
    assert struct.unpack_from("<3I", page) == (7, 9, 0)
    ask(controller, log(LogPage.CHANGED_NAMESPACES, 4096))
    assert ask(controller, log(LogPage.CHANGED_NAMESPACES, 4096)).data == bytes(4096)
    controller.namespace_changed(1)
    assert [c.cid for c in controller.completed_events()] == [41]


def test_a_host_has_four_event_requests_and_no_more():
    controller = make()
    for cid in range(4):
        assert ask(controller, Sqe(Admin.ASYNC_EVENT, cid=cid)) is None
    assert ask(controller, Sqe(Admin.ASYNC_EVENT, cid=9)).status == Status.AER_LIMIT_EXCEEDED | DNR


def test_the_keep_alive_timer_runs_from_the_last_command():
    controller = make(kato_ms=5000)
    assert controller.expires_s() == 106.0
    ask(controller, Sqe(Admin.KEEP_ALIVE), now_s=103.0)
    assert controller.expires_s() == 109.0
    assert make(kato_ms=0).expires_s() == float("inf")


def test_a_discovery_controller_knows_its_log_and_no_namespaces():
    entries = [DiscoveryEntry("nqn.2026-11.io.example:s", "10.0.0.1", 4420)]
    controller = make(discovery=lambda: (9, entries))
    assert ControllerIdentity.unpack(ask(controller, identify(1)).data).kind == 2
    data = ask(controller, log(LogPage.DISCOVERY, 2048)).data
    assert unpack_discovery_log(data) == (9, 1, entries)
    assert ask(controller, identify(2)).status == Status.INVALID_FIELD | DNR
    assert ask(controller, log(LogPage.SMART, 512)).status == Status.INVALID_LOG_PAGE | DNR
