"""Models of policies."""
