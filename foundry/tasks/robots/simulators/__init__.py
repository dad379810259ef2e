"""Simulators, in which a policy acts, and experts that demonstrate."""
