"""PDUs in Python: the same rules as the native receiver, and the same PDUs however they are split."""

import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.fabric.pdu import (
    DATA,
    Fatal,
    Format,
    PduFault,
    PduSplitter,
    Rules,
    Type,
    check_common,
    encode,
    icreq,
    icresp,
    read_icreq,
    read_icresp,
    read_term_req,
    term_req,
)

RULES = st.builds(
    Rules,
    to_host=st.booleans(),
    established=st.booleans(),
    hdgst=st.booleans(),
    ddgst=st.booleans(),
    alignment=st.sampled_from([4, 8, 64, 128]),
    capsule_data_max=st.sampled_from([0, 512, 8192]),
    data_max=st.sampled_from([512, 65536]),
)
# Values near the right ones, so that each check is reached.
HEADERS = st.builds(
    lambda *fields: struct.pack("<BBBBI", *fields),
    st.integers(0, 12),
    st.integers(0, 31),
    st.sampled_from([8, 23, 24, 25, 72, 128, 255]),
    st.sampled_from([0, 4, 24, 26, 28, 32, 72, 76, 128, 255]),
    st.one_of(
        st.integers(0, 200),
        st.sampled_from([512 + 24, 512 + 32, 8192 + 72, 8192 + 76, 65536 + 28, 2**32 - 1]),
    ),
)


def native(header, rules):
    return _native.fabric_check_common(
        header,
        to_host=rules.to_host,
        established=rules.established,
        hdgst=rules.hdgst,
        ddgst=rules.ddgst,
        alignment=rules.alignment,
        capsule_data_max=rules.capsule_data_max,
        data_max=rules.data_max,
    )


@settings(max_examples=3000, deadline=None)
@given(HEADERS, RULES)
@example(struct.pack("<BBBBI", 7, 5, 255, 28, 540), Rules(to_host=True, hdgst=True, data_max=512))
def test_python_and_native_judge_headers_alike(header, rules):
    try:
        layout = check_common(header, rules)
        here = (0, 0, layout.header_bytes, layout.pad_bytes, layout.data_bytes)
    except PduFault as fault:
        here = (fault.status, fault.info, 0, 0, 0)
    assert native(header, rules) == here


def stream(form):
    payload = bytes(range(96))
    return (
        encode(Type.C2H_DATA, DATA.pack(1, 0, 0, 96), payload, 4, form)
        + encode(Type.CAPSULE_RESP, bytes(16), form=form)
        + encode(Type.R2T, DATA.pack(1, 2, 0, 64), form=form)
    )


@pytest.mark.parametrize(
    "form", [Format(), Format(True), Format(False, True), Format(True, True, 64)]
)
def test_every_pdu_split_at_every_byte(form):
    rules = Rules(
        to_host=True, hdgst=form.hdgst, ddgst=form.ddgst, alignment=form.alignment, data_max=4096
    )
    whole = stream(form)
    expected = list(PduSplitter(rules).feed(whole))
    assert [pdu.type for pdu in expected] == [Type.C2H_DATA, Type.CAPSULE_RESP, Type.R2T]
    for split in range(len(whole) + 1):
        splitter = PduSplitter(rules)
        assert [*splitter.feed(whole[:split]), *splitter.feed(whole[split:])] == expected


def test_a_flipped_bit_is_found_wherever_it_is():
    form = Format(True, True)
    rules = Rules(to_host=True, hdgst=True, ddgst=True, data_max=4096)
    whole = bytearray(encode(Type.C2H_DATA, DATA.pack(1, 0, 0, 96), bytes(range(96)), 4, form))
    found = 0
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            pdus = list(PduSplitter(rules).feed(bytes(damaged)))
        except PduFault:
            found += 1
        else:
            found += not pdus or not pdus[0].intact
    assert found == len(whole) * 8


def test_init_pdus_have_the_specification_s_bytes():
    assert icreq(3) == bytes.fromhex("00008000800000000000000300000000") + bytes(112)
    assert icresp(1, 131072) == bytes.fromhex("01008000800000000000000100000200") + bytes(112)
    assert read_icresp(icresp(1, 131072), offered=3).limit == 131072


@pytest.mark.parametrize(
    ("at", "value", "info"), [(8, 1, 8), (10, 32, 10), (11, 4, 11)], ids=["pfv", "hpda", "dgst"]
)
def test_an_icreq_with_one_wrong_field(at, value, info):
    wrong = bytearray(icreq(3))
    wrong[at] = value
    with pytest.raises(PduFault) as fault:
        read_icreq(bytes(wrong))
    assert fault.value.info == info


@pytest.mark.parametrize("limit", [0, 4092, 4098])
def test_an_icresp_with_a_wrong_maxh2cdata(limit):
    with pytest.raises(PduFault) as fault:
        read_icresp(icresp(0, limit), offered=3)
    assert fault.value.info == 12


def test_a_term_req_says_what_was_wrong():
    fault = PduFault(Fatal.HEADER_DIGEST, 0x11223344, "")
    made = term_req(fault, bytes(500), from_host=True)
    assert len(made) == 152
    assert check_common(made[:8], Rules(to_host=False, hdgst=True)).header_bytes == 152
    assert read_term_req(made) == "HEADER_DIGEST (0x11223344)"


def test_the_checksum_is_the_native_one():
    data = np.frombuffer(b"123456789", np.uint8)
    assert _native.crc32c(data) == 0xE3069283
