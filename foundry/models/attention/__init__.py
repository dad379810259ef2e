"""Scaled dot-product attention, and layouts of rows with several sequences."""
