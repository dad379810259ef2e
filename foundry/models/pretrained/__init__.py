"""Models of transformers: their configs, weight files and sizes."""
