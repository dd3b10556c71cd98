"""The node daemon: one data plane for all processes of a user on a node, and its clients.

Start with `daemon` (how the process is run), `server` (its loop) and `reads` (what a loader asks).
docs/protocol.md says what they say to one another.
"""
