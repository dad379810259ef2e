from foundry.evaluators.drawn_samples import DrawnSamples as DrawnSamples
from foundry.evaluators.exact_match import ExactMatch as ExactMatch
from foundry.evaluators.held_out import HeldOut as HeldOut
from foundry.tasks.robots.evaluators.success import Success as Success
