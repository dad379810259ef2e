"""Explaining a composition that failed: every error at once, with key, value and remedy."""
