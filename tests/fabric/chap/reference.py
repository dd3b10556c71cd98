"""DH-HMAC-CHAP once more, straight from the specification's figures, sharing no code with headrace."""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct
import zlib

HASHES = {1: ("sha256", 32), 2: ("sha384", 48), 3: ("sha512", 64)}
HOSTNQN, SUBNQN = "nqn.2026-11.io.example:host-a", "nqn.2026-11.io.example:one"


def secret_text(value: bytes, transform: int) -> str:
    checked = value + struct.pack("<I", zlib.crc32(value))
    return f"DHHC-1:{transform:02}:{base64.b64encode(checked).decode()}:"


def transformed(value: bytes, transform: int, nqn: str) -> bytes:
    if transform == 0:
        return value
    return hmac.new(value, nqn.encode() + b"NVMe-over-Fabrics", HASHES[transform][0]).digest()


def augmented(challenge: bytes, hash_id: int, shared: int | None, size: int) -> bytes:
    if shared is None:
        return challenge
    name = HASHES[hash_id][0]
    session = hashlib.new(name, shared.to_bytes(size, "big")).digest()
    return hmac.new(session, challenge, name).digest()


def response(
    key: bytes,
    hash_id: int,
    challenge: bytes,
    sequence: int,
    tid: int,
    role: str,
    me: str,
    you: str,
) -> bytes:
    mac = hmac.new(key, challenge, HASHES[hash_id][0])
    mac.update(sequence.to_bytes(4, "little"))
    mac.update(tid.to_bytes(2, "little"))
    mac.update(b"\0")  # SC_C
    mac.update(role.encode() + me.encode() + b"\0" + you.encode())
    return mac.digest()


def negotiate(
    tid: int, hashes: bytes = b"\1\2\3", groups: bytes = b"\0\1\2\3\4\5", **fields: int
) -> bytes:
    head = bytes([0, 0, 0, 0]) + tid.to_bytes(2, "little")
    head += bytes([fields.get("sc_c", 0), fields.get("napd", 1)])
    protocol = bytes([fields.get("authid", 1), 0])
    protocol += bytes([fields.get("halen", len(hashes)), fields.get("dhlen", len(groups))])
    return head + protocol + hashes.ljust(30, b"\0") + groups.ljust(30, b"\0")


def challenge(
    tid: int, hash_id: int, group: int, sequence: int, value: bytes, public: bytes = b""
) -> bytes:
    head = bytes([1, 1, 0, 0]) + tid.to_bytes(2, "little")
    head += bytes([len(value), 0, hash_id, group]) + len(public).to_bytes(2, "little")
    return head + sequence.to_bytes(4, "little") + value + public


def reply(
    tid: int, proof: bytes, value: bytes | None = None, sequence: int = 0, public: bytes = b""
) -> bytes:
    head = bytes([1, 2, 0, 0]) + tid.to_bytes(2, "little")
    head += bytes([len(proof), 0, int(value is not None), 0]) + len(public).to_bytes(2, "little")
    return head + sequence.to_bytes(4, "little") + proof + (value or bytes(len(proof))) + public


def success1(tid: int, size: int, proof: bytes | None = None) -> bytes:
    head = (
        bytes([1, 3, 0, 0]) + tid.to_bytes(2, "little") + bytes([size, 0, int(proof is not None)])
    )
    return head + bytes(7) + (proof or bytes(size))


def success2(tid: int) -> bytes:
    return bytes([1, 4, 0, 0]) + tid.to_bytes(2, "little") + bytes(10)


def failure(number: int, tid: int, explanation: int) -> bytes:
    return bytes([0, number, 0, 0]) + tid.to_bytes(2, "little") + bytes([1, explanation])
