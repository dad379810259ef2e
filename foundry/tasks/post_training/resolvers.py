"""Values of the configuration that are computed from the sizes of a rollout."""


def completions_per_update(prompts: int, generations: int, updates: int) -> int:
    """Return the number of completions in an optimizer step."""
    return max(1, prompts * generations // max(1, updates))
