"""Episodes of robots, recorded or demonstrated, and their statistics."""
