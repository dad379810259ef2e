"""Models of transformers: their configs, files of weights and sizes."""
