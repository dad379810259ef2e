from foundry.optim.schedules import WSD as WSD
from foundry.optim.schedules import Constant as Constant
from foundry.optim.schedules import Cosine as Cosine
from foundry.optim.schedules import InverseSquareRoot as InverseSquareRoot
from foundry.optim.schedules import Linear as Linear
