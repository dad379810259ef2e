from foundry.tasks.post_training.environments.matching import Arithmetic as Arithmetic
from foundry.tasks.post_training.environments.matching import ExactMatch as ExactMatch
from foundry.tasks.post_training.environments.matching import Format as Format
from foundry.tasks.post_training.environments.matching import MultipleChoice as MultipleChoice
from foundry.tasks.post_training.environments.python import Python as Python
