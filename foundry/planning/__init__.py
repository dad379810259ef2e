"""What a run will be and need, known before it starts."""
