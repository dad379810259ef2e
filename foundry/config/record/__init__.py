"""Recorded configurations: writing, hashing, reading without trust, and comparison on resume."""
