"""Environment variable that tells the attempts of a job apart."""

ATTEMPT = "FOUNDRY_ATTEMPT"
"""Environment variable with a text that the ranks of one attempt of a job share, and no other attempt has."""
