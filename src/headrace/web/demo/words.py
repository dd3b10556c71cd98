"""Words: what is in the demo, and how likely."""

from __future__ import annotations

from typing import Final

from headrace.base.causes import Cause

__all__ = ["CAUSES", "FILE_SYSTEMS", "MODELS", "PARTITIONS", "SIZES", "TIERS", "user_names"]

PARTITIONS: Final = (
    ("h100", "hgx", 0.45),
    ("a100", "dgx", 0.35),
    ("l40s", "ai", 0.16),
    ("debug", "dbg", 0.04),
)
"""Name, how its nodes are called, and its share of them."""

SIZES: Final = (
    (1, 0.34),
    (2, 0.14),
    (4, 0.16),
    (8, 0.20),
    (16, 0.08),
    (32, 0.05),
    (64, 0.02),
    (128, 0.01),
)
"""GPUs of a job, and how likely."""

MODELS: Final = (
    "resnet50", "vit-l16", "clip-pretrain", "llama-7b-sft", "llama-70b-lora", "whisper-large", "unet3d",
    "cosmoflow", "wav2vec2", "deepcam", "bert-large", "dlrm", "sd-xl", "yolo-v9", "graphcast", "alphafold-ft",
    "swin-b", "mixtral-moe", "t5-xxl", "segment-any", "nerf-batch", "esm2", "mamba-2.8b", "dino-v2",
)  # fmt: skip

FILE_SYSTEMS: Final = (("/scratch", 0.55, 240e9), ("/datasets", 0.22, 90e9), ("/project", 0.13, 60e9),
                       ("s3://corpora", 0.10, 40e9))  # fmt: skip
"""Mount, its share of jobs, and the bytes a second that it can give to a thousand nodes."""

CAUSES: Final = (
    (Cause.METADATA, 0.20, True), (Cause.LATENCY, 0.20, True), (Cause.BANDWIDTH, 0.12, True),
    (Cause.NETWORK, 0.08, True), (Cause.PEER, 0.04, True), (Cause.DECODE, 0.16, False),
    (Cause.PYTHON, 0.06, False), (Cause.COLLATE, 0.04, False), (Cause.TRANSFER, 0.04, False),
    (Cause.SLOW_RANK, 0.05, False), (Cause.POLICY, 0.01, True),
)  # fmt: skip
"""Why a job waits, how likely, and whether a file system has to do with it."""

TIERS: Final = ("ram", "disk", "peer", "source")

_SYLLABLES: Final = (
    "an", "be", "ca", "do", "el", "fa", "gi", "ha", "io", "ju", "ka", "li", "mo", "na", "ola", "pe", "ri",
    "sa", "ti", "ya",
)  # fmt: skip


def user_names(count: int) -> list[str]:
    """So many different names, always the same."""
    names: list[str] = []
    for at in range(count):
        first, second = divmod(at * 7 % 400, 20)
        more = "" if at < 400 else str(at // 400)
        names.append(
            _SYLLABLES[first] + _SYLLABLES[second] + _SYLLABLES[(first + second) % 20][:1] + more
        )
    return names
