"""Where a policy acts: simulators, and the experts that show it what to do."""
