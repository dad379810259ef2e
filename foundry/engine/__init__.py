"""One run on each rank: building its parts, initial and restored weights, training, and the files of its directory."""
