"""The schemas of the configuration, one file a group."""
