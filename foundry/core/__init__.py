"""Code shared by all rooms: events, protocols, progress, durations, errors, random numbers; imports no room above."""
