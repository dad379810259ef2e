"""Simulators for policies, and experts that produce demonstrations."""
