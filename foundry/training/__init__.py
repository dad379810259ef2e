"""Training loop: trainer, optimizer step, evaluation, guards, signals and throughput."""
