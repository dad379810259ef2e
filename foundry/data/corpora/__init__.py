"""Text and token datasets: documents, tokenizers, token caches, and fixed-length sequences."""
