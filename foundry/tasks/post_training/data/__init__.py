"""Data of post-training: preferences and prompts."""
