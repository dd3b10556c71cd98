"""PDUs in Python: the same however they are split, and what is wrong with them."""

import numpy as np
import pytest

from fabric.asking import icreq
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
    icresp,
    read_icreq,
    read_term_req,
    term_req,
)


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


@pytest.mark.parametrize(
    ("at", "value", "info"), [(8, 1, 8), (10, 32, 10), (11, 4, 11)], ids=["pfv", "hpda", "dgst"]
)
def test_an_icreq_with_one_wrong_field(at, value, info):
    wrong = bytearray(icreq(3))
    wrong[at] = value
    with pytest.raises(PduFault) as fault:
        read_icreq(bytes(wrong))
    assert fault.value.info == info


def test_a_term_req_says_what_was_wrong():
    fault = PduFault(Fatal.HEADER_DIGEST, 0x11223344, "")
    made = term_req(fault, bytes(500), from_host=True)
    assert len(made) == 152
    assert check_common(made[:8], Rules(to_host=False, hdgst=True)).header_bytes == 152
    assert read_term_req(made) == "HEADER_DIGEST (0x11223344)"


def test_the_checksum_is_the_native_one():
    data = np.frombuffer(b"123456789", np.uint8)
    assert _native.crc32c(data) == 0xE3069283
