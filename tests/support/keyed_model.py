"""A custom model that requires an API key."""

from foundry.models.transformer import Transformer


def build(*, api_key, header, **settings):
    """Build a decoder if the key is valid."""
    assert api_key.startswith("canary-")
    assert header.endswith(api_key)
    if settings.pop("fails"):
        raise PermissionError(f"401 for {api_key}")
    return Transformer(**settings)
