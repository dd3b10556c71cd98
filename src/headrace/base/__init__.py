"""The floor: questions that have one answer, whoever asks.

* `job`: which rank, node and job this process is, by whose word. The only reader of launchers' variables.
* `files`: opens, creates, replaces, locks and publishes what other users may have touched.
* `text`: numbers, sizes and times as people read them, names that are safe to print.
* `checksum`, `documents`: CRC-32C, and JSON that carries its own.
* `loop`: one thread that waits for descriptors and for other threads.
* `lifetime`: what is closed by a `with` block; an event that a signal handler may set; what is computed once.
* `extras`: packages that are optional, and what is said where one is missing.
* `causes`: why training waits, in one closed list with a sentence and a remedy each.
"""
