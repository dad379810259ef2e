"""Distributed training: process group, model wrapping, gradient synchronization and precision."""
