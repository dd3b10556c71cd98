"""Tests of headrace.telemetry."""
