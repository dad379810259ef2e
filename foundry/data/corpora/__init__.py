"""Text and tokens: documents, tokenizers, token caches, sequences of a fixed length."""
