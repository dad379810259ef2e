"""Decoding: continuing prompts, filters and draws of tokens, and samples to look at."""
