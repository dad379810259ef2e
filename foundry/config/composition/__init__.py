"""Composing a configuration: schemas, options, resolvers, and everything used of Hydra."""
