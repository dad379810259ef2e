"""Parts of the decoder of model=transformer."""
