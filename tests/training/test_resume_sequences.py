"""After kills, stops and restarts a run ends bit for bit as an undisturbed one, unless the microbatch size changes."""

import logging
import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sequence_parts import TRAP, Killed, Watcher
from support.examples import examples, some_of

from foundry.checkpoint import retention, writer
from foundry.checkpoint.folder import problems, read_manifest
from foundry.config.schemas.checkpoint import Checkpoint, KeepBest
from foundry.config.schemas.evaluation import EarlyStopping, Evaluation, Mode, PatienceUnit
from foundry.config.schemas.guard import Guard, SpikeAction
from foundry.config.schemas.hparams import BatchRamp, HParams
from foundry.config.schemas.optimizer import AdamW
from foundry.config.schemas.precision import Precision, PrecisionMode
from foundry.config.schemas.root import Config
from foundry.config.schemas.scheduler import Cosine
from foundry.config.schemas.tracking import Tracking
from foundry.core.stop_signals import Stopped
from foundry.engine.train import build_observers, train
from foundry.run_dir.checkpoints import find, list_checkpoints
from foundry.tracking.metrics_file import read_metrics

STEPS, INTERVAL = 12, 2
TIMINGS = {"step_seconds", "samples_per_second", "peak_memory_bytes"}
HPARAMS = HParams(
    global_batch_size=8, per_gpu_batch_size=4, accum_freq=2, lr=0.1, max_steps=STEPS, grad_clip_norm=4.0, ema_decay=0.9
)
PLAIN = Config(
    hparams=HPARAMS,
    optimizer=AdamW(weight_decay=0.1),
    scheduler=Cosine(warmup="0.25"),
    precision=Precision(mode=PrecisionMode.fp32),
    model={"_target_": "sequence_parts.Linear"},
    data={"_target_": "sequence_parts.whole_numbers", "has_spike": False},
    objective={"_target_": "sequence_parts.Sum", "is_noisy": False},
    evaluation=Evaluation(interval="3", write_samples=False),
    checkpoint=Checkpoint(
        interval=str(INTERVAL),
        every_minutes=None,
        asynchronous=False,
        keep_best=KeepBest(metric="val_loss", mode=Mode.min),
    ),
    tracking=Tracking(log_every_n_steps=1, progress=False, plots=False, mlflow=False),
)
NOISY = replace(PLAIN, objective={"_target_": "sequence_parts.Sum", "is_noisy": True})
STOPPING = EarlyStopping(metric="val_loss", patience=2, unit=PatienceUnit.evaluations, min_delta=1000.0)
VARIANTS = {
    "plain": PLAIN,
    "noisy": NOISY,
    "ramped": replace(PLAIN, hparams=replace(HPARAMS, batch_ramp=BatchRamp(start=4, increment=4, over_samples="24"))),
    "stops early": replace(NOISY, evaluation=replace(PLAIN.evaluation, early_stopping=STOPPING)),
    "rolls back": replace(
        NOISY,
        data={**PLAIN.data, "has_spike": True},
        guard=Guard(spike_zscore=20.0, spike_window=8, spike_action=SpikeAction.rollback),
    ),
}
# Maximum visits of each place in a run: inside a save, inside a step, and in observer calls.
PLACES = {"write": 12, "publish": 12, "link": 14, "delete": 6}
PLACES |= {"read": 60, "forward": 24, "start": 1, "step": 12, "evaluation": 4, "end": 1}
STOPS = {f"stop at {place}": PLACES[place] for place in ("read", "step", "evaluation", "start", "write", "end")}

AT_THE_END = {"place": "end", "when": 1.0, "asynchronous": False, "keep_last": 1, "interval": 5, "microbatch": 4}

lives = st.lists(
    st.fixed_dictionaries(
        {
            "place": st.sampled_from([*PLACES, *STOPS]),
            "when": st.floats(0, 1, exclude_min=True),
            "asynchronous": st.booleans(),
            "keep_last": st.integers(1, 3),
            "interval": st.sampled_from((1, 2, 3, 5)),
            "microbatch": st.sampled_from((1, 2, 4)),
        }
    ),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module", autouse=True)
def trapped():
    """Install the places where a run can be killed."""
    patch = pytest.MonkeyPatch()
    patch.setattr("foundry.engine.train.build_observers", lambda *args: [Watcher(), *build_observers(*args)])
    for module, name, place in (
        (writer, "write_json", "write"),
        (writer, "publish", "publish"),
        (writer, "link", "link"),
        (retention.shutil, "rmtree", "delete"),
    ):
        patch.setattr(module, name, spring_then(place, getattr(module, name)))
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)
    patch.undo()


def spring_then(place, function):
    def call(*args, **options):
        TRAP.spring(place)
        return function(*args, **options)

    return call


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    folder = tmp_path_factory.mktemp("references")
    return {name: outcome(config, folder / name) for name, config in VARIANTS.items()}


def outcome(config, run_dir):
    """Return the outcome of a run: numbers that the microbatch size may change by rounding, and exact ones."""
    result = train(config, run_dir).result
    records = [{k: v for k, v in record.items() if k not in TIMINGS} for record in read_metrics(run_dir)]
    final = read_manifest(find(run_dir))
    state = {**final.state, "loss": 0.0, "best": {}, "stop_rules": {}, "step": {}}
    rounded = [records, [final.state[name] for name in ("loss", "best", "stop_rules")], result["val_loss"]]
    return rounded, (dict(final.files), state, result["step"], result["best"]["step"], len(records))


def config_of(variant, life):
    """Return the configuration of one life, with changes between restarts that do not affect the outcome."""
    config = VARIANTS[variant]
    microbatch = life["microbatch"] if variant in ("plain", "ramped") else 4
    hparams = replace(config.hparams, per_gpu_batch_size=microbatch, accum_freq=8 // microbatch)
    interval = INTERVAL if variant == "rolls back" else life["interval"]
    checkpoint = replace(
        config.checkpoint,
        interval=str(interval),
        # A background thread in this process would survive the simulated kill.
        asynchronous=life["asynchronous"] and life["place"].startswith("stop"),
        keep_last=life["keep_last"],
    )
    return replace(config, hparams=hparams, checkpoint=checkpoint)


def live(config, run_dir, life):
    """Train until the run ends, or until `life` kills or stops the run at its place and visit."""
    TRAP.set(life["place"], math.ceil(life["when"] * (PLACES | STOPS)[life["place"]]))
    try:
        train(config, run_dir)
    except (Killed, Stopped):
        pass
    finally:
        TRAP.set("", 0)


@pytest.mark.parametrize("variant", some_of(VARIANTS, "noisy", "rolls back"))
def test_killed_and_restarted_run_matches_an_undisturbed_run(variant, references, tmp_path_factory):
    seen = []

    @settings(
        max_examples=examples(40),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(lives)
    @example([AT_THE_END])
    def check(drawn):
        run_dir = tmp_path_factory.mktemp("run")
        for life in drawn:
            if variant == "rolls back" and life["place"].startswith("stop"):
                continue  # A stop would add a checkpoint to roll back to.
            live(config_of(variant, life), run_dir, life)
            assert all(problems(folder) == [] for folder in list_checkpoints(run_dir))
        rounded, exact = outcome(VARIANTS[variant], run_dir)
        assert exact == references[variant][1]
        is_same = variant not in ("plain", "ramped")
        assert rounded == (references[variant][0] if is_same else close_to(references[variant][0]))
        seen.append(len(drawn))

    check()
    assert len(seen) >= examples(40)


def close_to(value):
    """Return the same numbers with a tolerance for rounding."""
    if isinstance(value, list):
        return [close_to(item) for item in value]
    if isinstance(value, dict):
        return {name: close_to(item) for name, item in value.items()}
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


def test_resume_variants_differ_as_named(references):
    steps = {name: exact[2] for name, (_, exact) in references.items()}
    assert steps == {**dict.fromkeys(VARIANTS, STEPS), "stops early": 9}
    assert references["rolls back"][1][1]["source"]["skipped"] > 0
    assert references["noisy"][1][0] != references["plain"][1][0]
