"""Unmodified programs: what they open below given folders is served by the node daemon."""
