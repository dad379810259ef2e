"""Names of the files and folders in a run directory and in a sweep directory."""

CONFIG = "config.yaml"
"""The resolved configuration."""

PLAN = "plan.json"
"""Values derived from the configuration: steps, tokens, memory."""

TOKENIZER = "tokenizer.json"
"""The tokenizer; with it, sampling and export need no training data."""

STOP_TOKENS = "generation_config.json"
"""Tokens that end a document or an answer, in the file that transformers writes next to a tokenizer."""

CHAT_TEMPLATE = "chat_template.jinja"
"""Template that formats chats as text, for runs on chats; transformers uses the same file name."""

TRANSFORMERS = "transformers"
"""Folder with the transformers files other than weights: the model's config.json and `TOKENIZER_FILES`.

With these copies nothing depends on the folder that the model and its tokenizer were loaded from.
"""

TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "generation_config.json",
    "chat_template.jinja",
)
"""Files that transformers and compatible tools keep next to tokenizer.json."""

MODEL_CARD = "README.md"
"""Model card of an export: model, data and final metrics."""

METRICS = "metrics.jsonl"
"""One line for each logged step and each evaluation."""

COLUMNS = "columns.safetensors"
"""Values precomputed by frozen models for every sample, such as the log-probabilities of the reference model."""

STATUS = "status.json"
"""Current state of the run."""

RESULT = "result.json"
"""Results of a finished run."""

LOG = "foundry.log"
"""Log of the run."""

OUTPUT = "output.log"
"""Standard output and error of a job of `hydra/launcher=local`, and of rank 0 of a job of `hydra/launcher=ray`."""

SUBMISSION = "slurm.json"
"""Slurm job of the run: job id, cluster and path of the error output."""

OPEN_SUBMISSION = "slurm_submission.json"
"""Jobs that are being submitted to Slurm and whose ids are not yet recorded; in the sweep directory."""

RAY = "ray.txt"
"""Random token of the job's last start by `hydra/launcher=ray`; nodes look for it in the run directory."""

KUBERNETES = "kubernetes.json"
"""Kubernetes job of the run: namespace, and kind and name of its resource."""

TRIAL = "trial.json"
"""Trial of a search that this run executes; only if the search has a pruner."""

RUNG = "rung.json"
"""Rung of a search where this run pauses; only in a search with successive halving."""

MLFLOW = "mlflow.json"
"""Server, experiment and run id in MLflow, of a run or a sweep."""

MLFLOW_PENDING = "mlflow_pending.jsonl"
"""Records not yet sent to MLflow."""

MLFLOW_PARENT = "mlflow_parent.json"
"""Sweep that the run is a job of, so that MLflow shows the run under the sweep's run."""

EVALUATION = "eval.json"
"""Results of `foundry.eval`."""

TASKS = "eval_tasks.json"
"""Results of `foundry.eval tasks=[...]`."""

MIRROR = "mirror.json"
"""Identity of a run that has a copy in a store; only with `checkpoint.mirror`."""

CHECKPOINTS = "checkpoints"
"""Folder with one subfolder for each checkpoint."""

PLOTS = "plots"
"""Folder with plots and sample images."""

PROFILE = "profile"
"""Folder with traces of torch's profiler for selected steps, one file for each rank."""

STACKS = "stacks"
"""Folder with the stack dumps of a stalled run, one file for each rank."""

FLIGHT_RECORDER = "flight_recorder"
"""Folder with dumps of torch's flight recorder (latest collectives) of a stalled run, one file for each rank."""

HYDRA = ".hydra"
"""Folder with Hydra's own record of the composition."""

SWEEP = "sweep.json"
"""Jobs of a sweep; in the sweep directory."""

MULTIRUN = "multirun.yaml"
"""Configuration of a sweep, as Hydra's sweeper writes it; in the sweep directory."""

STUDY = "optuna.jsonl"
"""Study of a search; in the sweep directory."""

STUDY_LINK = "study.json"
"""Shared study of a search, and the id of this sweep directory in the study; in the sweep directory."""
