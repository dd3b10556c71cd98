"""What a mount can do: bandwidth, metadata rates, batches of small samples, latency's tail; and advice."""

from __future__ import annotations

from headrace.bench.storage.characterise import StorageOptions, characterise

__all__ = ["StorageOptions", "characterise"]
