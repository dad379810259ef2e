"""Windows of what the model itself generates, scored."""
