"""Datasets of chats, preferences and prompts: tokenized examples with a loss mask."""
