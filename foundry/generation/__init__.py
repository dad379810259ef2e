"""Text generation: continuation of prompts, token filters and sampling, and sample files for users."""
