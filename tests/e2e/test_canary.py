"""A secret in any setting or environment variable appears in no output and no file of any command."""

import stat

import pytest
import yaml
from support.composition import configure
from support.examples import long_case
from support.tiny import SMALL_LM
from support.warm import WarmShell

from foundry.config.record.frozen import plain

CANARY = "canary-8c41d07e"
VARIABLES = {
    "OWN_SECRET": CANARY,
    "STORE": f"http://ann:{CANARY}@127.0.0.1:9",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "1",
    "SIGNED": f"cache?X-Amz-Signature={CANARY}",
}


@pytest.fixture(scope="module")
def warm(tmp_path_factory, cache):
    cwd = tmp_path_factory.mktemp("canary")
    settings = plain(configure(*SMALL_LM).model)
    del settings["init_from"]
    own = {"_target_": "support.keyed_model.build", "api_key": "${oc.env:OWN_SECRET}", "fails": False}
    own["header"] = "Bearer ${oc.env:OWN_SECRET}"
    (cwd / "own" / "model").mkdir(parents=True)
    (cwd / "own" / "model" / "keyed.yaml").write_text(yaml.safe_dump(settings | own))
    return WarmShell(cwd, cache)


OWN = ["--config-dir", "own", "model=keyed"]
# The user's own model has no schema, so the settings of the built-in schema are left out.
WORDS = [
    *(word for word in SMALL_LM if not word.startswith("model.")),
    "objective.sample_tokens=4",
    "hparams.max_steps=2",
]
STORE = ["tracking.mlflow=true", "tracking.uri=${oc.env:STORE}", "+hydra.job.env_set.HF_TOKEN=${oc.env:OWN_SECRET}"]


def found_in(folder):
    """Return the files that contain the secret."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if CANARY.encode() in path.read_bytes()]


@pytest.mark.long
def test_secret_from_the_environment_is_in_no_file_and_no_output(warm):
    def do(*overrides, code=0, **options):
        message = warm.run(*overrides, code=code, variables=VARIABLES, **options)
        assert CANARY not in "".join(message)
        return message

    run = [*OWN, *WORDS, *STORE, "hydra.run.dir=run"]
    do(*run)
    do(*run, "hparams.max_steps=3", "checkpoint.scheduler_on_resume=config")
    assert "OWN_SECRET" in (warm.cwd / "run" / "config.yaml").read_text()
    do(*OWN, *WORDS, "hydra.run.dir=failed", "model.fails=true", code=1)
    assert "401 for ***" in (warm.cwd / "failed" / "status.json").read_text()
    do(*OWN, *WORDS, "distributed.nproc_per_node=2", "hydra.run.dir=ranks", "hparams.global_batch_size=8")
    do(*OWN, *WORDS, "hydra.run.dir=planned", module="foundry.plan")
    sweep = ["-m", *OWN, *WORDS, *STORE, "hparams.seed=1,2", "hydra/launcher=local", "hydra.sweep.dir=sweep"]
    do(*sweep, "hydra.launcher.n_jobs=2")
    do("dir=sweep", module="foundry.report")
    do("dir=run", module="foundry.sync", code=2)
    do("dir=run", f"uri={VARIABLES['STORE']}", module="foundry.sync", code=1)
    do("--cfg", "job", "--resolve", *OWN, *WORDS, *STORE)
    do("--cfg", "all", *OWN, *WORDS, *STORE)
    assert not found_in(warm.cwd)
    assert (warm.cwd / "run" / "mlflow_pending.jsonl").exists()
    loose = [path for path in (warm.cwd / "run").rglob("*") if path.stat().st_mode & stat.S_IWOTH]
    assert not loose


@pytest.mark.parametrize(
    "overrides",
    [
        ["tracking.uri=http://ann:{}@host"],
        ["+model.hf_token={}"],
        long_case(["tracking.ur=http://ann:{}@host"]),
        long_case(["data.cache_dir='{}?sig={}'"]),
        ["-m", "tracking.uri=http://ann:{}@host", "hparams.seed=1,2"],
        long_case(["-m", "model.api_key={},other"]),
        long_case(["-m", "hydra/sweeper=basic", "model.api_key={}"]),
        long_case(["--cfg", "job", "model.api_key={}"]),
    ],
    ids=str,
)
def test_secret_given_as_an_override_is_refused_and_not_printed(warm, overrides):
    own = [word.format(*[CANARY] * word.count("{}")) for word in overrides]
    message = warm.run(
        *own, *OWN, *WORDS, "hydra.run.dir=refused", "hydra.sweep.dir=refused", code=2, variables=VARIABLES
    )
    assert CANARY not in "".join(message)
    assert not (warm.cwd / "refused").exists()
