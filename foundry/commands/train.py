"""`foundry` without a command name: compose a configuration, check it, and train."""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from typing import NoReturn, TypeVar

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from foundry.config.checks.method import log_method
from foundry.config.command import output_may_close, versions
from foundry.config.composition.choices import compose_with, keep_choices
from foundry.config.composition.compose import CONFIG_NAME, config_dir, install
from foundry.config.composition.hydra_application import replace_run_job, write_help
from foundry.config.composition.hydra_internals import compose_once
from foundry.config.composition.hydra_versions import hydra_main
from foundry.config.diagnostics.flags import arrange_flags, check_flags, plain_overrides
from foundry.config.diagnostics.help import list_groups, write_page, write_sweep_page
from foundry.config.environment import detect
from foundry.config.schemas.root import to_config
from foundry.core.errors import ConfigError, format_reason
from foundry.core.exit_codes import ExitCode
from foundry.core.stop_signals import Stopped
from foundry.launch.claim import Refused, describe_disk_error, run_job
from foundry.launch.local import exit_code_of, format_trace, report_failure
from foundry.run_dir.files import UnsafeFileError
from foundry.run_dir.lock import RunDirectoryLostError
from foundry.run_dir.log import log_to_file
from foundry.run_dir.redact import one_line, printable
from foundry.run_dir.strict_json import DamagedFileError
from foundry.sweeps.plugins import register
from foundry.sweeps.worker import start_job

Result = TypeVar("Result")


@hydra_main(config_path=config_dir(), config_name=CONFIG_NAME)
def task(composed: DictConfig) -> float | None:
    """Run one composed configuration; return the metric that sweeps compare."""
    log_method(composed)
    return in_run_dir(partial(start_job, to_config(composed))).metric


def in_run_dir(work: Callable[[Path], Result]) -> Result:
    """Run `work` with the run directory that Hydra created; `foundry.launch.claim` removes it if the run is refused."""
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        return work(run_dir)
    except ConfigError as error:
        if HydraConfig.get().mode is RunMode.RUN:
            raise Refused(error) from None
        raise  # a sweep continues with its other jobs
    except Stopped as stopped:
        if detect().rank == 0:
            with suppress(OSError):  # the terminal is closed, as after SIGHUP
                sys.stderr.write(f"{stopped}{_resume_hint(stopped)}\n")
        raise  # `stopped` contains the exit code; a sweep ends too
    except Exception as error:
        log_to_file(f"failed:\n{format_trace(error)}")
        raise


def _resume_hint(stopped: Stopped) -> str:
    if stopped.checkpoint is None:
        return ""
    if stopped.state == "requeued":
        return "; the job is queued again and resumes from there"
    hydra = HydraConfig.get()
    folder = f"run.dir={hydra.run.dir}" if hydra.mode is RunMode.RUN else f"sweep.dir={hydra.sweep.dir}"
    return f"; the same command with hydra.{folder} resumes from there"


def main() -> None:
    """Entry point of the command."""
    if "--version" not in sys.argv[1:]:
        enter(task)
        return
    with output_may_close():
        sys.stdout.write(f"{versions()}\n")


@contextmanager
def _masked_output() -> Iterator[None]:
    """Mask secrets in the output of `--cfg job --resolve`, which contains values of environment variables."""
    with redirect_stdout(StringIO()) as output:
        yield
    sys.stdout.write(printable(output.getvalue()))


def _check_flags(arguments: Sequence[str], options: Collection[str]) -> None:
    """Refuse flags that are not Hydra's, together with all errors in the overrides.

    Raises:
        ConfigError: a flag is unknown to Hydra.
    """
    try:
        check_flags(arguments, options)
    except ConfigError as error:
        from foundry.commands.library import compose

        violations = list(error.violations)
        try:
            compose(plain_overrides(arguments))
        except ConfigError as override_error:
            violations += override_error.violations
        raise ConfigError(violations) from None


def enter(task: Callable[[], object], options: Collection[str] = ()) -> None:
    """Compose and run a task; exit with code 2 and a line for each configuration error, or 1 if the task failed.

    Args:
        task: function that composes the arguments in `sys.argv` and runs the result.
        options: keys of the command's own options, which are not settings of a run.
    """
    try:
        _check_flags(sys.argv[1:], options)
        sys.argv[1:] = arrange_flags(sys.argv[1:])
        install(is_only_application=True)
        register()
        replace_run_job(run_job, list_groups)
        keep_choices()
        compose_once(compose_with)
        write_help(CONFIG_NAME, write_page, write_sweep_page)
        if detect().rank > 0:
            sys.argv += ["hydra.output_subdir=null", "hydra/job_logging=none"]
        with output_may_close(), _masked_output() if "--resolve" in sys.argv else nullcontext():
            task()
    except KeyboardInterrupt:
        sys.exit(ExitCode.SIGINT)
    except Stopped as stopped:
        report_failure(stopped)
        raise
    except Refused as refused:
        _fail(refused.error)
    except Exception as error:
        _fail(error)


def _fail(error: Exception) -> NoReturn:
    """Print the error of a command, report it to the process that started this one, and exit."""
    code = exit_code_of(error)
    if isinstance(error, HydraException | OmegaConfBaseException | UnsafeFileError | DamagedFileError):
        message = str(error) or format_reason(error.__cause__ or error)  # Hydra may raise without a message
        text, code = f"{one_line(message)}\n", ExitCode.REFUSED
    elif isinstance(error, ConfigError):
        text = f"{error}\n"
    elif isinstance(error, RunDirectoryLostError):
        text = f"{one_line(str(error))}\n"
    else:
        line = describe_disk_error(error)
        text = printable(format_trace(error)) if line is None else f"{line}\n"
    sys.stderr.write(text)
    report_failure(error, code)
    sys.exit(code)
