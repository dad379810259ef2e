"""Datasets of chats: tokenized examples with a loss mask."""
