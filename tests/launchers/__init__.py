"""Launchers: real ones start scripts as users write them, and every sample is counted."""
