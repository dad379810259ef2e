"""Names of the files and metrics of robots."""

STATISTICS = "statistics.json"
"""By what a robot's states and actions are normalised, so that a policy acts without its demonstrations."""

ROLLOUTS = "rollouts.jsonl"
"""Beside the pictures: a line for each episode that a policy was measured by."""

SUCCESS_METRICS = ("success", "success_low", "success_high", "episode_length")
"""The rate, the bounds of its 95 % interval, and the mean number of actions."""
