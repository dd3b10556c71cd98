"""The outer contract: what users, scripts and other programs rely on, kept as texts."""
