"""Names, readers and writers of a run directory's small files; all other code accesses them through this package."""
