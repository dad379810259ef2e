from foundry.optim.optimizers import adam as adam
from foundry.optim.optimizers import adamw as adamw
from foundry.optim.optimizers import muon as muon
from foundry.optim.optimizers import sgd as sgd
