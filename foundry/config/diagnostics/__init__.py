"""Explanation of a failed composition: every error at once, with key, value and remedy."""
