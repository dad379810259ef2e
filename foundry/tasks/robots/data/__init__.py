"""Episodes of robots: recorded, demonstrated, and their statistics."""
