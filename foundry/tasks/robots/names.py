"""Names of the files and metrics of robots."""

STATISTICS = "statistics.json"
"""Normalization statistics of a robot's states and actions, which let a policy act without its demonstrations."""

ROLLOUTS = "rollouts.jsonl"
"""File with a JSON line per evaluated episode, next to the GIFs."""

SUCCESS_METRICS = ("success", "success_low", "success_high", "episode_length")
"""Metrics: success rate, bounds of its 95 % interval, and mean number of actions per episode."""
