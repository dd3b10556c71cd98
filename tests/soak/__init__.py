"""The kill soak: the daemon and its clients for real, killed and stopped at random moments.

* samples: the data, and what each sample must be; written by the tester, not by headrace
* page: what a client says of itself while it runs, and the driver of it
* client: the programs that are killed; they check every byte that they get
* actors: processes that can be started, killed and stopped
* events: what is done to them
* watching: calls that take too long, and how clients come back to a daemon
* leftovers: what must not stay behind
* driver: one run

    python -m soak --kills 300 --seed 1 --json out.json
"""
