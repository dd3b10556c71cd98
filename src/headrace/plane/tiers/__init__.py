"""Tiers and limits: stages between the reader of a source and the order that asks for batches."""

from headrace.plane.tiers.chain import Chain, build_chain
from headrace.plane.tiers.disk import CacheReport, DiskTier
from headrace.plane.tiers.ram import RamTier
from headrace.plane.tiers.reads import PendingReads, Reads
from headrace.plane.tiers.shelf import CacheInfo, Shelf
from headrace.plane.tiers.throttle import Throttle

__all__ = [
    "CacheInfo",
    "CacheReport",
    "Chain",
    "DiskTier",
    "PendingReads",
    "RamTier",
    "Reads",
    "Shelf",
    "Throttle",
    "build_chain",
]
