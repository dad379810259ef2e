"""File input: readers of rows and text, remote files, file hashes, and cache folders."""
