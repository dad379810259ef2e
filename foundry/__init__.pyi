from foundry.config.errors import ConfigError as ConfigError
from foundry.config.schemas.root import Config as Config
from foundry.config.stopped import Stopped as Stopped
from foundry.library import compose as compose
from foundry.library import run as run
from foundry.train import RunResult as RunResult

__version__: str
