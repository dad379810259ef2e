"""Datasets, tokenizers, the sample order and the data loader."""
