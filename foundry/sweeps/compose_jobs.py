"""Fast composition of the jobs of a sweep, each composed once."""

import gc
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from foundry.config.checks.check import check
from foundry.config.checks.group_checks import GroupChecks
from foundry.config.composition.hydra_internals import (
    apply_overrides,
    load_unchecked,
    open_repository,
    require_loader,
)
from foundry.config.composition.hydra_versions import record_override_dirname
from foundry.config.composition.start_dir import anchor_paths
from foundry.config.diagnostics.override_errors import SweepCache, choice_line, find_errors
from foundry.core.errors import ConfigError, Violation

Overrides = tuple[str, ...]


def compose_jobs(
    loader: ConfigLoader, master: DictConfig, jobs: Sequence[Sequence[str]]
) -> list[DictConfig | ConfigError]:
    """Compose and check jobs.

    `loader.load_sweep_config` returns the same configurations, but reads and merges the chosen options, and checks all
    groups, anew for each job. This function merges options once for all jobs with the same choices, and checks a group
    once for all jobs with the same settings in it.

    Args:
        loader: Hydra's config loader.
        master: the configuration of the sweep.
        jobs: the overrides of each job.

    Returns:
        For each job, its configuration or an error with all its violations.
    """
    composer = _Composer(loader, master)
    results: list[DictConfig | ConfigError] = []
    with _young_objects_collected():
        for overrides in map(tuple, jobs):
            try:
                results.append(composer.compose(overrides))
            except ConfigError as error:
                results.append(error)
    return results


@contextmanager
def _young_objects_collected() -> Iterator[None]:
    """Exclude objects that have survived a garbage collection from further ones within the context.

    The configurations of all jobs stay in memory, and going through them again and again takes a third of the time.
    """
    threshold = gc.get_threshold()
    gc.set_threshold(10_000, 1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)


class _Composer:
    """Composer of a sweep's jobs; the options are read and merged once for all jobs with the same choices."""

    def __init__(self, loader: ConfigLoader, master: DictConfig) -> None:
        self._loader = require_loader(loader)
        self._master = master
        # Iterating over the DictConfig would resolve interpolations in the overrides.
        hydra_lines = OmegaConf.to_container(master.hydra.overrides.hydra, resolve=False)
        assert isinstance(hydra_lines, list)
        self.hydra_overrides: Overrides = tuple(map(str, hydra_lines))
        self._parser = OverridesParser.create(config_loader=loader)
        parsed = self._parser.parse_overrides(list(self.hydra_overrides))
        # This repository includes the folders of hydra.searchpath.
        self._repository, error = open_repository(loader, master.hydra.job.config_name, parsed)
        if error is not None:
            raise error
        self._checked = GroupChecks()
        self._cache = SweepCache(self._repository, self._checked)
        self._bases: dict[Overrides, bytes] = {}
        self._overrides: dict[str, Override] = {}

    def compose(self, overrides: Overrides) -> DictConfig:
        """Compose one job.

        Raises:
            ConfigError: with all errors of the job.
        """
        try:
            config = self._compose(overrides)
        except Exception as error:  # any exception, since Hydra and OmegaConf also raise undocumented ones
            raise ConfigError(self._find_errors(overrides, error)) from error
        if violations := check(config, self._checked):
            raise ConfigError(violations)
        anchor_paths(config)
        return config

    def _find_errors(self, overrides: Overrides, error: Exception) -> list[Violation]:
        """Return all errors of a job that does not compose, and reuse the options that were already read."""

        def compose(lines: list[str]) -> DictConfig:
            return self._base(tuple(line for line in lines if line not in self.hydra_overrides))

        name, lines = self._master.hydra.job.config_name, [*self.hydra_overrides, *overrides]
        return find_errors(self._loader, name, compose, lines, error, is_run=True, cache=self._cache)

    def _compose(self, lines: Overrides) -> DictConfig:
        overrides = [self._parse(line) for line in lines]
        task_overrides = [override for override in overrides if not override.is_hydra_override()]
        values = [override for override in task_overrides if not self._is_choice(override)]
        config = self._base(tuple(choice_line(self._repository, o) for o in overrides if o not in values))
        apply_overrides(values, config)
        with open_dict(config.hydra):
            config.hydra.overrides.task = [override.input_line for override in task_overrides]
            record_override_dirname(config, task_overrides)
        # Keep values that were resolved once for the sweep, such as the time in its directory's name.
        OmegaConf.copy_cache(from_config=self._master, to_config=config)
        return config

    def _base(self, choices: Overrides) -> DictConfig:
        """Return the composition of the chosen options, unchecked because value overrides are applied later."""
        if choices not in self._bases:
            name = self._master.hydra.job.config_name
            self._bases[choices] = pickle.dumps(load_unchecked(self._loader, name, [*self.hydra_overrides, *choices]))
        # Unpickling takes a fifth of the time of deepcopy.
        config = pickle.loads(self._bases[choices])
        assert isinstance(config, DictConfig)
        return config

    def _parse(self, line: str) -> Override:
        if line not in self._overrides:
            (self._overrides[line],) = self._parser.parse_overrides([line])
        return self._overrides[line]

    def _is_choice(self, override: Override) -> bool:
        """Return whether an override chooses an option of a group, by Hydra's own rule."""
        return not isinstance(override.value(), dict) and self._repository.group_exists(override.key_or_group)
