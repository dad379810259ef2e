"""A user's own model, which needs a key."""

from foundry.models.transformer import Transformer


def build(*, api_key, header, **settings):
    """A decoder, for whoever has the key."""
    assert api_key.startswith("canary-")
    assert header.endswith(api_key)
    if settings.pop("fails"):
        raise PermissionError(f"401 for {api_key}")
    return Transformer(**settings)
