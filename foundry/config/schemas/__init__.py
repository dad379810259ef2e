"""The schemas of the configuration, a folder for each group."""
