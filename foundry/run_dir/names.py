"""The names of the files and folders in a run directory, and in the directory of a sweep."""

CONFIG = "config.yaml"
"""The resolved configuration."""

PLAN = "plan.json"
"""What follows from the configuration: steps, tokens, memory."""

TOKENIZER = "tokenizer.json"
"""The tokenizer, so that sampling and export need no training data."""

STOP_TOKENS = "generation_config.json"
"""Which tokens end a document or an answer, as transformers writes it beside a tokenizer."""

CHAT_TEMPLATE = "chat_template.jinja"
"""How chats become text, of a run over chats; transformers' name for it."""

TRANSFORMERS = "transformers"
"""A folder with what transformers has besides weights, so that nobody needs the folder that a model and its tokenizer
came from: the model's config.json, and `TOKENIZER_FILES`."""

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
"""What transformers, and those who read its folders, have beside tokenizer.json."""

MODEL_CARD = "README.md"
"""Of an export: what was trained on what, and what came of it."""

METRICS = "metrics.jsonl"
"""A line for each logged step and each evaluation."""

COLUMNS = "columns.safetensors"
"""What a frozen model made of every sample before the first step, such as the log-probabilities of a reference."""

STATUS = "status.json"
"""What the run is doing."""

RESULT = "result.json"
"""What came of a run that has finished."""

LOG = "foundry.log"
"""What the run logs."""

OUTPUT = "output.log"
"""What a job of `hydra/launcher=local` prints."""

SUBMISSION = "slurm.json"
"""What Slurm calls the job."""

TRIAL = "trial.json"
"""Which trial of a search the run is."""

MLFLOW = "mlflow.json"
"""Where in MLflow the run, or the sweep, is kept."""

MLFLOW_PENDING = "mlflow_pending.jsonl"
"""What MLflow has not taken yet."""

MLFLOW_PARENT = "mlflow_parent.json"
"""Which sweep the run is a job of."""

EVALUATION = "eval.json"
"""What `foundry.eval` has measured."""

TASKS = "eval_tasks.json"
"""What `foundry.eval tasks=[...]` has measured."""

CHECKPOINTS = "checkpoints"
"""A folder with a folder for each checkpoint."""

PLOTS = "plots"
"""A folder with pictures, samples among them."""

PROFILE = "profile"
"""A folder with what torch's profiler has recorded of chosen steps, a file for each rank."""

STACKS = "stacks"
"""A folder with where each rank was when one had waited for long, a file for each."""

FLIGHT_RECORDER = "flight_recorder"
"""A folder with the latest collectives of each rank when one had waited for long, a file for each as torch has it."""

HYDRA = ".hydra"
"""A folder with what Hydra composed the run of."""

SWEEP = "sweep.json"
"""In a sweep's directory: its jobs."""

MULTIRUN = "multirun.yaml"
"""In a sweep's directory: its own configuration, as Hydra's sweeper writes it."""

STUDY = "optuna.jsonl"
"""In a sweep's directory: the study of a search."""
