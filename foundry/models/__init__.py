"""Models: architectures, initial weights, log-probabilities and adapters."""
