"""Invalid overrides on the command line: exit code 2, at most one line per error, no traceback, no file."""

import re

import pytest
from support.composition import compose

from foundry.config.diagnostics.other_frameworks import hint
from foundry.core.errors import ConfigError


def ramp(start, increment, over_samples):
    return f"hparams.batch_ramp={{start: {start}, increment: {increment}, over_samples: {over_samples}}}"


LONG = "a" * 256
"""A word longer than a file name can be."""

PAIRS = ["objective=dpo", "data=arithmetic", "data.form=preferences"]
# (overrides, number of errors, expected text of the message)
CASES = [
    ([f"{LONG}=1"], 1, "is neither a group nor a key"),
    ([f"+{LONG}=1", "hparams.leer=1"], 2, "did you mean hparams.lr?"),
    ([f"data={LONG}"], 1, "has no option"),
    ([f"data.{LONG}=1"], 1, "is not a key of data"),
    ([f"{LONG}/{LONG}=1"], 1, LONG[:20]),
    ([f"~{LONG}"], 1, LONG[:20]),
    (["hparams.leer=1e-3"], 1, "did you mean hparams.lr?"),
    (["hparms.lr=1e-3"], 1, "hparms"),
    (["lr=1e-3"], 1, "; write hparams.lr=1e-3"),
    (["hparams.precision=amp_bfloat16"], 1, "; write precision=amp_bfloat16"),
    (["distributed.fsdp=true"], 1, "; write distributed=fsdp"),
    (["BF16=True"], 1, "; write precision=amp_bf16"),
    (["+bf16=true"], 1, "; write precision=amp_bf16"),
    (["bf16=true"], 1, "; write precision=amp_bf16"),
    (["precision=bf16"], 1, "; write precision=amp_bf16"),
    (["scheduler=WSD"], 1, "; write scheduler=wsd"),
    (["optimizer=AdamX"], 1, "did you mean adam?"),
    (["hparams={precision: fp32}"], 1, "; write precision=fp32"),
    (["accum_freq=8"], 1, "has no direct counterpart: computed: "),
    (["nonsense_type=sft"], 1, "is neither a group nor a key"),
    (["shceduler=wsd"], 1, "did you mean scheduler?"),
    (["scheduler=wds"], 1, "did you mean wsd?"),
    (["hparams=difusion"], 1, "did you mean diffusion?"),
    (["optimizer=adamx"], 1, "options: adam, adamw, muon, nemo_adam, nemo_adamw, sgd"),
    (["optimizer=null"], 1, "cannot be null"),
    (["precision=fp8"], 1, "amp_bfloat16"),
    (["precision.mode=bf16"], 1, "amp_float16; write precision=amp_bf16"),
    (["hparams.lr=abc"], 1, "must be a number"),
    (["hparams.lr=-1"], 1, "must be above 0"),
    (["hparams.lr=0"], 1, "must be above 0"),
    (["hparams.lr=nan"], 1, "must be above 0"),
    (["hparams.seed=1.5"], 1, "must be a whole number"),
    (["hparams.torchcompile=auto"], 1, "hparams.torchcompile: is auto but must be true or false"),
    (["hparams.check_first_step=maybe"], 1, "must be true, false or auto"),
    (["hparams.deterministic=maybe"], 1, "must be true or false"),
    (["hparams.global_batch_size=17", "hparams.per_gpu_batch_size=4"], 1, "nearest: 16 or 20"),
    (["hparams.per_gpu_batch_size=0"], 1, "must be at least 1"),
    (["hparams.max_steps=null"], 1, "no budget"),
    (["hparams.max_steps=0"], 1, "must be at least 1"),
    (["hparams.loss_function=mse"], 1, "minimizes cross_entropy"),
    (["hparams.loss_function=mse", "hparams.z_loss_coefficient=1", "hparams=diffusion"], 1, "Diffusion has no z-loss"),
    (["objective=dpo"], 1, "data.path: has no value"),
    ([*PAIRS, "data.form=chats"], 1, "is DPO, which needs pairs"),
    ([*PAIRS, "objective.preference_loss_weight=0"], 1, "set one of them above 0"),
    ([*PAIRS, "objective.label_smoothing=0.5"], 1, "must be below 0.5"),
    ([*PAIRS, "objective.ref_policy_kl_penalty=0"], 1, "must be above 0"),
    (["hparams.accum_freq=3"], 1, "is computed"),
    (["objective=diffusion", "data=stdlib", "model=transformer"], 1, "refers to data.num_classes"),
    (["objective=diffusion", "data=stdlib", "model=transformer", "objective.num_classes=3"], 1, "which needs images"),
    (["scheduler.warmup=1.5"], 1, "decimal point"),
    (["scheduler.warmup=-10"], 1, "not a duration"),
    (["scheduler.warmup=10 parsecs"], 1, "unknown unit"),
    (["scheduler.warmup=100000"], 1, "a warm-up of 100000 steps does not fit into the 500 steps"),
    (["scheduler=wsd", "scheduler.warmup=0.8"], 1, "decay of"),
    (["scheduler=wsd", "scheduler.decay=0"], 1, "is 0 but must be above 0"),
    (["scheduler.horizon=0"], 1, "is 0 but must be above 0"),
    (["scheduler.start_weight_decay=0.1"], 1, "set both or neither"),
    (["scheduler.start_weight_decay=0.1", "scheduler.end_weight_decay=0.2"], 1, "choose linear or cosine"),
    (["scheduler.weight_decay_incr_style=linear"], 1, "are null; set both"),
    (["scheduler.weight_decay_horizon=10"], 1, "has no horizon; set it to null"),
    (["hparams.batch_ramp.start=4"], 1, "has no increment and no over_samples (or every_samples); set"),
    (["hparams.batch_ramp.every_samples=4"], 1, "has no start and no increment"),
    (
        [ramp(4, 4, 900), "hparams.batch_ramp.every_samples=900"],
        1,
        "hparams.batch_ramp.every_samples: is set together with over_samples",
    ),
    (
        ["hparams.batch_ramp={start: 4, increment: 3, every_samples: 90}"],
        1,
        "does not grow from 4 to 8 in increments of 3",
    ),
    (
        ["hparams.batch_ramp={start: 4, increment: 4, every_samples: 0}"],
        1,
        "has a length of 0 samples; it must be at least 1",
    ),
    (
        ["hparams.loss_function=mse"],
        1,
        "which does not choose the loss: objective NextToken minimizes cross_entropy; ",
    ),
    (
        ["hparams.loss_function=mse"],
        1,
        "objective=diffusion|diffusion_policy|flow_policy, or set hparams.loss_function=c",
    ),
    (["hparams.loss_function=l1"], 1, "choose objective=action_regression, or set"),
    (["hparams.loss_function=hinge"], 1, "minimizes cross_entropy; set hparams.loss_function=cross_entropy"),
    (
        ["hparams.max_steps=-1"],
        1,
        "hparams.max_steps: is -1 but must be at least 1; hparams.max_steps=null: ",
    ),
    (["hparams.lr=-1"], 1, "hparams.lr: is -1 but must be above 0"),
    (["distributed.init_method=nonsense"], 1, "is nonsense but must be env://, tcp://HOST:PORT or file:///PATH"),
    (["distributed.init_method=tcp://host"], 1, "tcp://host but must be env://, tcp://HOST:PORT"),
    (["distributed.init_method=tcp://host:0"], 1, "must be env://"),
    (["distributed.init_method=tcp://host:99999"], 1, "must be env://"),
    (["distributed.init_method=file://relative"], 1, "must be env://"),
    (["distributed.init_method=env://x"], 1, "must be env://"),
    (
        ["hydra.run.dir=s3://bucket/run"],
        1,
        "hydra.run.dir: is s3://bucket/run, a URL; give a folder",
    ),
    (["hydra.sweep.dir=gs://bucket/run"], 1, "hydra.sweep.dir: is gs://bucket/run, a URL"),
    (["data.cache_dir=memory://x"], 1, "data.cache_dir: is memory://x, a URL"),
    (["checkpoint.resume=hf://owner/name"], 1, "checkpoint.resume: is hf://owner/name, a URL"),
    ([ramp(3, 1, 100)], 1, "not multiples of per_gpu_batch_size 4 x 1 rank = 4: 3, 5, 6, 7"),
    ([ramp(2, 2, 100), "hparams.allow_rounding=true"], 1, "would be rounded down to 0"),
    ([ramp(4, 3, 100)], 1, "does not grow from 4 to 8 in increments of 3"),
    ([ramp(4, 4, "1M")], 1, "after 1000000 samples, but the run has only 2000"),
    ([ramp(4, 4, "1x")], 1, "'1x' is not a whole number"),
    (
        ["hparams.batch_ramp={strat: 4}"],
        1,
        "hparams.batch_ramp.strat: is not a key of hparams.batch_ramp; did you mean",
    ),
    (["hparams.batch_schedule='0:4 10k:16'"], 1, "the last size of hparams.batch_schedule is 16"),
    (["hparams.batch_schedule='0:4 10k'"], 1, "is not THRESHOLD:SIZE"),
    (["hparams.batch_schedule='0:4 10k:8'", ramp(4, 4, 100)], 1, "choose one of them"),
    (["hparams.batch_schedule='0:4 10M:8'"], 1, "reaches its last size, 8, after 39064 samples"),
    (["+optimizer.groups.patterns.x={match: '('}"], 1, "is not a valid regular expression"),
    (["+optimizer.groups.patterns.x={match: norm, lr_mul: 2}"], 1, "did you mean lr_mult?"),
    (["optimizer.groups.head.lr_mult=-1"], 1, "must be at least 0"),
    (["+optimizer.groups.patterns.x={match: null, lr_mult: 2}"], 1, "match: is None but must be a string found in"),
    (["+optimizer.groups.patterns.x={match: norm, lr_mult: null}"], 1, "lr_mult: is None but must be a number"),
    (["optimizer.groups.head.beta1=1"], 1, "must be below 1"),
    (["+optimizer.groups.patterns.x={match: norm, beta2: high}"], 1, "x.beta2: is high but must be a number"),
    (["optimizer=sgd", "optimizer.groups.head.beta1=0.5"], 1, "head.beta1: is 0.5 but optimizer=sgd has no moments"),
    (["optimizer=sgd", "+optimizer.groups.patterns.x={match: norm, beta2: 0}"], 1, "x.beta2: is 0 but optimizer=sgd"),
    (
        ["optimizer=adamw", "optimizer.moments_dtype=bf16", "optimizer.groups.head.beta2=0.999"],
        1,
        "optimizer.groups.head.beta2: is 0.999, but a moment stored in bf16",
    ),
    (["checkpoint.scheduler_on_resume=both"], 1, "must be one of match, config, checkpoint"),
    (["scheduler.decay=0.3"], 1, "belongs to scheduler=wsd"),
    (["scheduler.min_lr=1"], 1, "hparams.lr is only"),
    (["scheduler=constant", "scheduler.min_lr=1e-5"], 1, "scheduler=constant has no decay"),
    (["distributed.cpu_offload=true"], 1, "belongs to distributed=fsdp and distributed=hsdp"),
    (["distributed.gradient_sync=evry"], 1, "did you mean every?"),
    (
        ["distributed=none", "distributed.nproc_per_node=2", "hparams.per_gpu_batch_size=1"],
        1,
        "choose ddp, fsdp or hsdp",
    ),
    (["distributed=hsdp", "distributed.num_replicas=3"], 1, "must divide"),
    (["distributed=ddp", "distributed.gradient_sync=last_keep_params"], 1, "never frees"),
    (["distributed=ddp", "distributed.overlap_param_gather=true"], 1, "shard_optimizer=true"),
    (["data=text"], 1, "data.path: has no value"),
    (["data=text", "data.path=/nowhere/*.txt"], 1, "which does not exist"),
    (["data=digits"], 2, "model.vocab_size: refers to data.vocab_size"),
    (["model=hf", "model.path=/nowhere"], 1, "which does not exist"),
    (["model=hf"], 1, "'+model.config={hidden_size"),
    (["model=hf_llama", "model.config={hidden_sise: 3}"], 1, "write +model.config={hidden_sise: 3}"),
    (["experiment=nope"], 1, "options: around_images, digits_epsilon"),
    (["foo"], 1, "key=value"),
    (["hparams.lr=1e-3,1e-4"], 1, "add -m"),
    (["hydra.launcher='???'"], 1, "hydra.launcher: has no value"),
    (["hydra.sweeper='???'"], 1, "hydra.sweeper: has no value"),
    (["hparams=[llm,diffusion]"], 1, "takes one option"),
    (["+hparams.foo=3"], 1, "hparams.foo"),
    (["+foo=3"], 1, "foo"),
    (["~hparams.lr"], 1, "cannot be removed"),
    (["~optimizer"], 1, "optimizer"),
    (["evaluation.interval=2 weeks"], 1, "unknown unit"),
    (["evaluation.interval=0"], 1, "must be above 0"),
    (["evaluation.interval='0.25'"], 1, "'0.25 run' for a fraction of the run"),
    (["evaluation.interval=1.5"], 1, "'1.5 epochs'"),
    (["evaluation.interval=true"], 1, "a number or a string"),
    (["evaluation.early_stopping.patience=0"], 1, "at least 1"),
    (["evaluation.early_stopping.patience=2", "evaluation.interval=null"], 1, "evaluates only at the end"),
    (
        ["evaluation.early_stopping.patience=3", "evaluation.early_stopping.unit=evaluations"],
        1,
        "is 3 evaluations after the first, but the run has only 3 before its end",
    ),
    (["evaluation.early_stopping.unit=steps"], 1, "must be one of evaluations, epochs"),
    (["guard.non_finite=skip", "guard.max_skips=0"], 1, "at least 1"),
    (["guard.spike_action=rollback"], 1, "guard.spike_zscore is null"),
    (["guard.non_finit=skip"], 1, "did you mean"),
    (
        ["guard.spike_zscore=6", "guard.spike_action=rollback", "checkpoint.every_minutes=null"],
        1,
        "saves no checkpoints to return to",
    ),
    (["evaluation.interval=600"], 1, "600 steps, but the run has only 500"),
    (["tracking.log_every_n_steps=0"], 1, "at least 1"),
    (["hparams.leer=1", "scheduler=wds", "hparams.seed=x"], 3, "did you mean"),
]


IDS = [" ".join(overrides) for overrides, _, _ in CASES]


@pytest.mark.parametrize(("overrides", "errors", "message"), CASES, ids=IDS)
def test_invalid_overrides_give_one_line_per_error(overrides, errors, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        compose(*overrides)
    assert len(str(caught.value).splitlines()) == errors


def one_in_twelve_by_default(cases):
    return [
        pytest.param(*case, id=name, marks=() if number % 12 == 0 else pytest.mark.long)
        for number, (case, name) in enumerate(zip(cases, IDS, strict=True))
    ]


@pytest.mark.parametrize(("overrides", "errors", "message"), one_in_twelve_by_default(CASES))
def test_command_prints_only_the_override_errors(overrides, errors, message, run_command):
    stdout, stderr = run_command(*overrides, code=2)
    assert len(stderr.splitlines()) == errors, stderr
    assert message in stderr
    assert "Traceback" not in stderr
    assert stdout == ""
    assert list(run_command.cwd.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("jit_mode_eval", None, "jit_mode_eval of TrainingArguments has no direct counterpart: use "),
        (
            "optim_args",
            None,
            "optim_args of TrainingArguments has no direct counterpart: use the settings of",
        ),
        ("lr_scheduler_type", "polynomial", "has no direct counterpart: for a power of 1, the default, use scheduler"),
        ("accum_freq", "8", "has no direct counterpart: computed: global_batch_size"),
    ],
)
def test_remedy_for_a_name_without_an_equal_setting_does_not_deny_the_remedy(key, value, expected):
    assert expected in hint(key, value, ())
