"""Files and rows: reading, remote files, digests, and folders of the cache."""
