"""Run commands of foundry within the test process, with the same results as `terminal.Shell.run`.

For commands that start no process and are not killed: errors, help pages, plans, reports, small runs. The process state
that a command changes is restored afterwards.
"""

import contextlib
import gc
import importlib
import logging
import os
import random
import runpy
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from pathlib import Path

from hydra._internal import hydra, utils
from hydra._internal.core_plugins import basic_launcher
from hydra.core import utils as core_utils
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase

from foundry.config.composition import compose as composing
from foundry.config.composition.choices import Choices
from foundry.run_dir import redact
from support.composition import CHOICES, OWN_OPTIONS
from support.terminal import passed_on

_PATCHED = (
    (utils, "run_and_report"),
    (hydra, "run_job"),
    (basic_launcher, "run_job"),
    *((module, "configure_log") for module in (hydra, core_utils)),
    *((hydra.Hydra, name) for name in ("get_mode", "app_help", "format_config_groups")),
)
"""Functions of Hydra that a command replaces in its process."""


class Commands:
    """Runs commands in a folder: `commands("hparams.lr=-1", code=2)` returns (stdout, stderr).

    `variables` are set for each command, such as PYTHONPATH=. for custom parts in the folder.
    """

    def __init__(self, cwd, cache, variables=None):
        self.cwd, self.cache, self.variables = cwd, cache, variables or {}

    def __call__(self, *overrides, module="foundry", code=0, variables=None):
        """Run `python -m <module> <overrides>`, expect an exit code, and return (stdout, stderr)."""
        environment = {**passed_on(), "FOUNDRY_CACHE": str(self.cache), **self.variables, **(variables or {})}
        choices = Choices() if any(word.startswith(OWN_OPTIONS) for word in overrides) else CHOICES
        with _output_file() as stdout, _output_file() as stderr:
            with _captured(stdout, stderr), _process_state(), choices.used():
                os.environ.clear()
                os.environ.update(environment)
                os.chdir(self.cwd)
                sys.argv = [module, *overrides]
                entries = [
                    str(Path(path).absolute()) for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path
                ]
                sys.path[:0] = entries if environment.get("PYTHONSAFEPATH") else [str(Path.cwd()), *entries]
                importlib.invalidate_caches()
                ended = _run(module)
            out, err = _text(stdout), _text(stderr)
        assert ended == code, f"exit code {ended}\n{out}\n{err}"
        return out, err


def _run(module):
    """Run a module as `__main__` and return the exit code."""
    sys.modules.pop(
        module if module != "foundry" else "foundry.__main__", None
    )  # runpy warns if it is imported already
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _output_file():
    return tempfile.TemporaryFile("w+", encoding="utf-8", buffering=1)


@contextlib.contextmanager
def _captured(*files):
    """Redirect stdout and stderr of Python and of C libraries to the files."""
    with contextlib.ExitStack() as stack:
        for number, stream, file in zip((1, 2), (sys.stdout, sys.stderr), files, strict=True):
            stream.flush()
            descriptor = os.dup(number)
            stack.callback(os.close, descriptor)
            stack.callback(os.dup2, descriptor, number)
            os.dup2(file.fileno(), number)
        stack.enter_context(contextlib.redirect_stdout(files[0]))
        stack.enter_context(contextlib.redirect_stderr(files[1]))
        yield


def _text(file):
    file.flush()
    file.seek(0)
    return file.read()


@contextlib.contextmanager
def _process_state():
    """Restore on exit the process state that a command changes; fail if a thread of the command goes on."""
    with contextlib.ExitStack() as stack:
        for keep in (_hydra, _python, _modules, _logging, _signals, _random_numbers, _torch):
            stack.callback(keep())
        threads = set(threading.enumerate())
        yield
        if _new_threads(threads):
            gc.collect()  # ends idle threads of unreferenced pools
        late = _new_threads(threads)
        for thread in late:
            thread.join(20)
        assert not any(thread.is_alive() for thread in late), f"threads go on after the command: {late}"


def _new_threads(before):
    """Return the threads that Python has started since `before`, without threads of torch."""
    return [t for t in threading.enumerate() if t not in before and not isinstance(t, threading._DummyThread)]


def _hydra():
    patched = [(owner, name, getattr(owner, name)) for owner, name in _PATCHED]
    plugins = Plugins.instance()
    kinds = {kind: list(classes) for kind, classes in plugins.plugin_type_to_subclass_list.items()}
    names = dict(plugins.class_name_to_class)
    application, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    job, version, alone = (
        JobRuntime.instance().get("name"),
        VersionBase.instance().version_base,
        composing._process.is_only_application,
    )
    GlobalHydra.instance().clear()

    def restore():
        for owner, name, function in patched:
            setattr(owner, name, function)
        plugins.plugin_type_to_subclass_list.clear()
        plugins.plugin_type_to_subclass_list.update(kinds)
        plugins.class_name_to_class.clear()
        plugins.class_name_to_class.update(names)
        GlobalHydra.instance().hydra, HydraConfig.instance().cfg = application, config
        JobRuntime.instance().set("name", job)
        VersionBase.instance().version_base, composing._process.is_only_application = version, alone

    return restore


def _python():
    cwd, environment, secrets = Path.cwd(), dict(os.environ), dict(redact._secrets)
    arguments, path = list(sys.argv), list(sys.path)
    catcher = warnings.catch_warnings()
    catcher.__enter__()

    def restore():
        catcher.__exit__(None, None, None)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        redact._secrets.clear()
        redact._secrets.update(secrets)
        sys.argv[:], sys.path[:] = arguments, path

    return restore


def _modules():
    """Unload modules of the command's folder, and restore the module that ran as `__main__`."""
    before = dict(sys.modules)

    def restore():
        folder = str(Path.cwd()) + os.sep
        for name, module in list(sys.modules.items()):
            if name not in before and (getattr(module, "__file__", None) or "").startswith(folder):
                del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if name not in sys.modules})

    return restore


def _logging():
    loggers = [logging.root, *(item for item in logging.root.manager.loggerDict.values() if hasattr(item, "handlers"))]
    before = [(logger, list(logger.handlers), logger.level, logger.disabled, logger.propagate) for logger in loggers]

    def restore():
        for logger, handlers, level, disabled, propagate in before:
            for handler in logger.handlers:
                if handler not in handlers:
                    handler.close()
            logger.handlers[:] = handlers
            logger.level, logger.disabled, logger.propagate = level, disabled, propagate
        logging.root.manager._clear_cache()  # once, since `setLevel` clears the caches of all loggers

    return restore


def _signals():
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def restore():
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)

    return restore


def _random_numbers():
    state, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = numpy and numpy.random.get_state()

    def restore():
        random.setstate(state)
        if numpy:
            numpy.random.set_state(of_numpy)

    return restore


def _torch():
    torch = sys.modules.get("torch")
    if torch is None:
        return lambda: None
    cudnn = torch.backends.cudnn
    random_state, threads, dtype = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    flags, precision = (cudnn.benchmark, cudnn.deterministic), torch.get_float32_matmul_precision()

    def restore():
        assert not torch.distributed.is_initialized(), "the command left a process group"
        torch.set_rng_state(random_state)
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns)
        cudnn.benchmark, cudnn.deterministic = flags
        torch.set_float32_matmul_precision(precision)

    return restore
