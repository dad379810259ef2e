"""Chats, preferences and prompts as examples with a loss mask."""
