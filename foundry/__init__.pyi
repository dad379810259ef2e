from foundry.commands.library import compose as compose
from foundry.commands.library import run as run
from foundry.config.schemas.root import Config as Config
from foundry.core.errors import ConfigError as ConfigError
from foundry.core.stopped import Stopped as Stopped
from foundry.engine.train import RunResult as RunResult

__version__: str
