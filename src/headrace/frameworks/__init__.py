"""Adapters: a framework's view of stores and loaders. Each imports its framework, none another."""
