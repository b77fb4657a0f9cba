"""Modes that try things out: tune, compare, doctor and export."""
