"""Composition of a configuration: schemas, options, resolvers, and all uses of undocumented Hydra functions."""
