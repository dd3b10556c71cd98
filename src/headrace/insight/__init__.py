"""What is seen of a node and its jobs, for people: dashboards, and the live view of `headrace top`.

Nothing here draws on a terminal: that is the command line's part.
"""
