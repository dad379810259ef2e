"""What scores a model's answers; no torch is imported here."""
