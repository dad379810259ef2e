"""Each access to private APIs of the installed Hydra behaves as foundry assumes."""

import fractions
import inspect
import os
import re
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import omegaconf.base
import pytest
from hydra import initialize_config_dir
from hydra._internal import config_loader_impl, defaults_list, hydra, utils
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins import basic_launcher
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import OmegaConf
from packaging.specifiers import SpecifierSet
from support.composition import allowed_by_hydra

import foundry
from foundry.config.build import build
from foundry.config.composition import hydra_application as application
from foundry.config.composition import hydra_internals as internals
from foundry.config.composition import hydra_versions as versions
from foundry.config.composition.choices import Choices, compose_with, current_files
from foundry.config.composition.compose import CONFIG_NAME, config_dir, install
from foundry.config.composition.hydra_versions import VERSION_BASE


@pytest.fixture
def loader():
    install()
    with initialize_config_dir(config_dir(), **VERSION_BASE):
        yield GlobalHydra.instance().config_loader()


def parsed(*overrides):
    return OverridesParser.create().parse_overrides(list(overrides))


def test_supported_hydra_range_matches_setup_cfg_and_the_installed_version():
    declared = (Path(__file__).parents[2] / "setup.cfg").read_text()
    assert f"hydra-core{versions.SUPPORTED}\n" in declared
    assert SpecifierSet(versions.SUPPORTED).contains(version("hydra-core"), prereleases=True)


def test_install_wraps_loading_once_and_load_unchecked_bypasses_it(loader):
    wrapped = ConfigLoaderImpl._load_configuration_impl
    assert hasattr(wrapped, "__wrapped__")
    install()
    assert ConfigLoaderImpl._load_configuration_impl is wrapped
    unchecked = internals.load_unchecked(loader, CONFIG_NAME, ["hparams.lr=-1"])
    assert unchecked.hparams.lr == -1, "which the wrapper would refuse"


def test_install_wraps_choices_once_and_records_only_typed_overrides(loader):
    wrapped = config_loader_impl.create_defaults_list
    assert hasattr(wrapped, "__wrapped__")
    install()
    assert config_loader_impl.create_defaults_list is wrapped
    typed = ["objective=sft", "data=arithmetic", "hparams.seed=4"]
    composed = loader.load_configuration(CONFIG_NAME, typed, RunMode.RUN)
    assert composed.hydra.runtime.choices.hparams == "sft"
    assert composed.hydra.overrides.task == typed


def test_open_repository_includes_options_of_the_search_path(loader, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.yaml").write_text("b: 1\n")
    repository, error = internals.open_repository(loader, CONFIG_NAME, parsed(f"hydra.searchpath=[{tmp_path}]"))
    assert error is None
    assert repository.group_exists("mine")
    _, error = internals.open_repository(loader, CONFIG_NAME, parsed("hydra.searchpath=7"))
    assert isinstance(error, Exception)


def test_apply_overrides_and_override_dirname_match_hydra(loader):
    config = internals.load_unchecked(loader, CONFIG_NAME, [])
    overrides = parsed("hparams.lr=0.125", "hparams.seed=4")
    internals.apply_overrides(overrides, config)
    assert (config.hparams.lr, config.hparams.seed) == (0.125, 4)
    composed = loader.load_configuration(CONFIG_NAME, ["hparams.lr=0.125", "hparams.seed=4"], RunMode.RUN)
    versions.record_override_dirname(config, overrides)
    config.hydra.overrides.task = composed.hydra.overrides.task
    assert config.hydra.job.override_dirname == composed.hydra.job.override_dirname == "hparams.lr=0.125,hparams.seed=4"


def test_interpolations_are_parsed_once_and_resolved_at_their_node(loader):
    config = OmegaConf.create({"a": 1, "b": "${a}", "c": "${a}", "d": {"a": 2, "b": "${.a}", "c": "${a}"}})
    before = omegaconf.base.parse.cache_info()
    assert (config.b, config.c, config.d.b, config.d.c) == (1, 1, 2, 1)
    assert omegaconf.base.parse.cache_info().misses <= before.misses + 2
    parse = omegaconf.base.parse
    install()
    assert omegaconf.base.parse is parse


def test_arguments_of_resolvers_are_read_once_only_if_they_are_constants(loader):
    """Each call receives its own containers, and references are resolved anew."""
    calls = []
    versions.register_resolver("noted", lambda *values: calls.append(values) or len(calls))
    config = OmegaConf.create({"a": 1, "b": "${noted:1,null,x y,'${a}'}", "c": "${noted:true,1.5,'',[2]}"})
    for number in (1, 2):
        config.a = number
        assert (config.b, config.c) == (2 * number - 1, 2 * number)
        assert calls[-2:] == [(1, None, "x y", str(number)), (True, 1.5, "", [2])]
        calls[-1][-1].append("own")
    OmegaConf.clear_resolver("noted")


@pytest.mark.skipif(not versions.IS_1_3, reason="Hydra 1.4 collects no choices")
def test_choices_are_collected_only_for_defaults_lists_with_interpolations(tmp_path, monkeypatch):
    install()
    for group, option in {"db": "sqlite", "server": "apache", "both": "sqlite_apache"}.items():
        (tmp_path / group).mkdir()
        (tmp_path / group / f"{option}.yaml").write_text(f"name: {option}\n")
    collected = []
    of_hydra = inspect.unwrap(defaults_list._create_interpolation_map)

    def collect(overrides, defaults_list, self_added):
        collected.append(len(defaults_list))
        return of_hydra(overrides, defaults_list, self_added)

    monkeypatch.setattr(defaults_list, "_create_interpolation_map", collect)
    internals.skip_unused_choices()
    for last, expected in (("sqlite_apache", []), ("${db}_${server}", [4])):
        lines = ["defaults:", "- db: sqlite", "- server: apache", f"- both: {last}", "- _self_", ""]
        (tmp_path / "config.yaml").write_text("\n".join(lines))
        with Choices().used(), initialize_config_dir(str(tmp_path), **VERSION_BASE):
            composed = GlobalHydra.instance().config_loader().load_configuration("config", [], RunMode.RUN)
        assert composed.both.name == "sqlite_apache"
        assert [length for length in collected if length == 4] == expected


def test_option_files_are_read_once_for_all_compositions_of_a_cache(loader):
    read = []

    def load(words):
        composed = internals.load_unchecked(loader, CONFIG_NAME, words)
        read.append(len(current_files() or ()))
        return composed

    first, others = ["scheduler=cosine"], (["scheduler=wsd"], ["scheduler=wsd", "precision=fp32"])
    with Choices().used():
        for words in (first, *others):
            composed = compose_with(load, loader, CONFIG_NAME, words, RunMode.RUN)
        before = dict(current_files())
        composed.scheduler._target_ = "changed"
        again = internals.load_unchecked(loader, CONFIG_NAME, others[-1])
        assert current_files() == before
    assert read[0] == 0, "a single composition needs no cache"
    assert read[1] > 20
    assert read[2] == read[1] + 1, "the option of one more group"
    with Choices().used():
        assert current_files() is None
        uncached = internals.load_unchecked(loader, CONFIG_NAME, others[-1])
    assert OmegaConf.to_yaml(again) == OmegaConf.to_yaml(uncached)


def test_search_path_starts_with_the_folder(tmp_path):
    paths = [element.path for element in internals.search_path(str(tmp_path)).get_path()]
    assert str(tmp_path) in paths[1] or str(tmp_path) in paths[0]


def test_current_config_restores_the_previous_hydra_config(loader):
    composed = loader.load_configuration(CONFIG_NAME, ["hydra.job.name=mine"], RunMode.RUN)
    before = HydraConfig.instance().cfg
    with application.current_config(composed):
        assert OmegaConf.create({"name": "${hydra:job.name}"}).name == "mine"
        assert HydraConfig.instance().cfg is composed
    assert HydraConfig.instance().cfg is before


def test_register_plugin_makes_a_class_available_by_name():
    application.register_plugin("hydra_plugins.foundry.Mine", dict)
    assert Plugins.instance().class_name_to_class.pop("hydra_plugins.foundry.Mine") is dict


def test_error_of_returns_the_job_exception_without_raising():
    error = ValueError("no")
    assert application.error_of(JobReturn(status=JobStatus.FAILED, _return_value=error)) is error
    assert application.error_of(JobReturn(status=JobStatus.COMPLETED, _return_value=1.5)) is None


def test_take_over_replaces_run_job_and_error_reporting(monkeypatch):
    for owner, name in ((utils, "run_and_report"), (hydra, "run_job"), (basic_launcher, "run_job")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(hydra.Hydra, "format_config_groups", hydra.Hydra.format_config_groups)
    application.replace_run_job(sorted, lambda loader, overrides: "listed")
    assert hydra.run_job is basic_launcher.run_job is sorted
    page = hydra.Hydra.format_config_groups
    assert page(SimpleNamespace(config_loader=None), lambda group: not group.startswith("hydra/")) == "listed"
    assert page(None, lambda group: group.startswith("hydra/")) == ""
    with pytest.raises(ZeroDivisionError):
        utils.run_and_report(lambda: 1 / 0)


@pytest.mark.parametrize("name", ["overrides", "config_dir", "config_path"])
def test_write_help_skips_composition_for_plain_help(name, loader, monkeypatch, capsys):
    composed = []
    app_help = lambda self, config_name, args_parser, args: composed.append(args)  # noqa: E731 - of 1.3
    if not versions.IS_1_3:
        app_help = lambda self, config_name, args_parser, args, parsed_overrides=None: composed.append(args)  # noqa: E731
    monkeypatch.setattr(hydra.Hydra, "app_help", app_help)
    application.write_help(CONFIG_NAME, lambda loader: "the page", lambda loader: "of sweeps")
    args = {"overrides": [], "config_dir": None, "config_path": None, "multirun": False}
    current = GlobalHydra.instance().hydra
    current.app_help(CONFIG_NAME, None, SimpleNamespace(**args))
    assert (capsys.readouterr().out, composed) == ("the page\n", [])
    current.app_help("another", None, SimpleNamespace(**args))
    current.app_help(CONFIG_NAME, None, SimpleNamespace(**{**args, name: ["a=1"]}))
    assert (capsys.readouterr().out, len(composed)) == ("", 2)
    current.app_help(CONFIG_NAME, None, SimpleNamespace(**{**args, name: ["a=1"], "multirun": True}))
    assert (capsys.readouterr().out, len(composed)) == ("of sweeps\n", 2)


def test_compose_once_caches_runs_and_leaves_sweeps_to_hydra(loader, monkeypatch):
    monkeypatch.setattr(hydra.Hydra, "get_mode", inspect.unwrap(hydra.Hydra.get_mode))
    monkeypatch.setattr(internals, "_composed_configs", {})
    internals.compose_once(compose_with)
    current, overrides = GlobalHydra.instance().hydra, ["hparams.lr=0.125", "hydra.job.name=mine"]
    assert current.get_mode(CONFIG_NAME, overrides) is None
    as_run = [*overrides, *versions.RUN_OVERRIDES]
    with monkeypatch.context() as patch:
        patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", None)  # any further composition fails
        once = loader.load_configuration(CONFIG_NAME, as_run, RunMode.RUN)
    again = loader.load_configuration(CONFIG_NAME, as_run, RunMode.RUN)
    assert OmegaConf.to_yaml(once) == OmegaConf.to_yaml(again)
    assert once.hydra.mode is again.hydra.mode is (RunMode.RUN if versions.IS_1_3 else None)
    assert current.get_mode(CONFIG_NAME, ["hydra.mode=MULTIRUN"]) is RunMode.MULTIRUN
    assert current.get_mode(CONFIG_NAME, ["hparams.lr=1,2"]) is None
    assert current.get_mode(CONFIG_NAME, ["no.such.key=1"]) is None
    assert not internals._composed_configs


def test_store_lazily_builds_a_schema_node_on_first_load(loader):
    made = []
    internals.store_lazily("lazy", lambda: made.append(1) or OmegaConf.create({"a": 1}), group="schema/test")
    store = ConfigStore.instance()
    try:
        loader.load_configuration(CONFIG_NAME, [], RunMode.RUN)
        assert not made
        first, second = store.load("schema/test/lazy.yaml").node, store.load("schema/test/lazy.yaml").node
        first.a = 2
        assert (second.a, store.list("schema/test")) == (1, ["lazy.yaml"])
    finally:
        del store.repo["schema"]["test"]


def test_unsupported_hydra_api_is_reported_with_its_version(monkeypatch, loader):
    monkeypatch.setattr(ConfigLoaderImpl, "_apply_overrides_to_config", lambda cfg: None)
    message = (
        rf"hydra-core {re.escape(version('hydra-core'))} takes cfg in ConfigLoaderImpl\._apply_overrides_to_config"
    )
    with pytest.raises(versions.UnsupportedHydraError, match=rf"{message}.*; install hydra-core>=1\.3\.8,<1\.5"):
        internals.apply_overrides([], None)
    monkeypatch.delattr(ConfigLoaderImpl, "_process_config_searchpath")
    with pytest.raises(versions.UnsupportedHydraError, match=r"has no ConfigLoaderImpl\._process_config_searchpath"):
        internals.open_repository(loader, CONFIG_NAME, [])
    with pytest.raises(versions.UnsupportedHydraError, match="composes with a object"):
        internals.require_loader(object())


@pytest.mark.parametrize("target", ["os.system", "logging.os.system", "os.remove", "logging.os.remove"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_instantiate_refuses_dangerous_functions_by_any_name(target, is_nested, tmp_path):
    kept = tmp_path / "kept"
    kept.touch()
    node = {"_target_": target, "_args_": [f"rm {kept}" if "system" in target else str(kept)]}
    outer = {"_target_": "builtins.dict", "value": [node]} if is_nested else node
    with pytest.raises(InstantiationException):
        versions.instantiate(OmegaConf.create(outer))()
    assert kept.exists()


def test_instantiate_builds_nested_parts_of_any_package():
    node = {"_target_": "builtins.dict", "at": {"_target_": "pathlib.Path", "_args_": ["a", "b"]}}
    assert versions.instantiate(OmegaConf.create(node))(now=1) == {"at": Path("a/b"), "now": 1}
    node = {"_target_": "builtins.dict", "net": {"_target_": "torch.nn.Identity"}}
    assert callable(versions.instantiate(OmegaConf.create(node))()["net"])


RETURNED = {
    "os.system": os.system,
    "partial": partial(os.system, "true"),
    "eval": eval,
    "object of another package": fractions.Fraction.from_float,
}


def give(which):
    return RETURNED[which]


def test_part_returns_objects_of_any_package_but_no_dangerous_function():
    part = versions.instantiate(OmegaConf.create({"_target_": f"{__name__}.give"}))
    assert part(which="object of another package")(0.5) == fractions.Fraction(1, 2)
    for name in ("os.system", "partial", "eval"):
        with pytest.raises(InstantiationException):
            part(which=name)


def build_child(child):
    return instantiate(child)


@pytest.mark.parametrize("context", [allowed_by_hydra, nullcontext], ids=["of a command", "of a rank"])
@pytest.mark.filterwarnings("error")
def test_part_may_build_the_nested_parts_of_its_configuration_itself(context):
    target = f"{__name__}.build_child"
    path = {"_target_": "pathlib.Path", "_args_": ["a"]}
    with context():
        assert build({"_target_": target, "_recursive_": False, "child": path}) == Path("a")
        with pytest.raises(InstantiationException):
            build({"_target_": target, "_recursive_": False}, child={"_target_": "os.remove", "path": "a"})


def test_private_hydra_apis_are_used_in_three_modules_only():
    private = re.compile(
        r"hydra\._internal|omegaconf\.(_|base)|ConfigLoaderImpl\._|HydraConfig\.instance\(\)\.cfg|class_name_to_class|IS_1_3"
    )
    package = Path(foundry.__file__).parent
    files = {str(file.relative_to(package)) for file in package.rglob("*.py") if private.search(file.read_text())}
    assert files == {f"config/composition/hydra_{name}.py" for name in ("application", "internals", "versions")}


def test_options_are_listed_again_only_after_a_change_of_the_search_path():
    class Listed:
        def __init__(self):
            self.options = ["one"]

        def initialize_sources(self, search_path):
            pass

        def group_exists(self, config_path):
            return bool(self.options)

        def get_group_options(self, group, results_filter):
            return list(self.options)

    repository = internals.OptionRepository(Listed())
    repository.get_group_options("model").append("changed by the caller")
    assert repository.group_exists("model")
    repository.delegate.options = []
    assert (repository.get_group_options("model"), repository.group_exists("model")) == (["one"], True)
    repository.initialize_sources(None)
    assert (repository.get_group_options("model"), repository.group_exists("model")) == ([], False)
