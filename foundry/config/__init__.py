"""Typed configuration of a run. Imports no torch."""
