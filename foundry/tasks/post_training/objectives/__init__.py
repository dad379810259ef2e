"""Objectives of post-training: losses on completions, on preferences and on the distributions of a teacher."""
