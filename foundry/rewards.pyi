from foundry.environments.matching import Arithmetic as Arithmetic
from foundry.environments.matching import ExactMatch as ExactMatch
from foundry.environments.matching import Format as Format
from foundry.environments.matching import MultipleChoice as MultipleChoice
from foundry.environments.python import Python as Python
