"""Shared by all rooms: events, protocols, progress, durations, errors, keyed random numbers; imports no room above."""
