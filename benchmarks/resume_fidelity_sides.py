"""One side of resume_fidelity.py in its own process: train and save, or continue from the newest checkpoint.

    python benchmarks/resume_fidelity_sides.py SIDE JOB.json
    torchrun --standalone --nproc-per-node 2 benchmarks/resume_fidelity_sides.py SIDE JOB.json

Each side checkpoints and resumes as its documentation says. `Intake` observes all sides in the same way: it reads the
ids of samples at the token embedding, and the number of the step from AdamW's own counter, which is in the checkpoint.
"""

import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from numbered_tokens import numbered_rows
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

Job = dict[str, Any]
MAX_RANKS = 2
"""A microbatch has this fraction of the global batch, so one rank accumulates this many microbatches."""
NUM_GENERATIONS = 4
"""Completions per prompt of GRPO."""
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


class Intake:
    """Log of a rank: ids of the samples that reach the model in training, and the number and time of each update.

    A line is `{"ids": [...]}` for a microbatch or `{"step": number, "time": seconds}` for an update. After the last
    step, rank 0 writes all trained parameters.

    Args:
        job: content of the job file.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._rank, self._has_samples = job, int(os.environ.get("RANK", "0")), False
        self._log = os.open(f"{job['log']}.{self._rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        register_module_forward_pre_hook(self._see)
        register_optimizer_step_post_hook(self._count)

    def _see(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if isinstance(module, nn.Embedding) and module.training and torch.is_grad_enabled():
            self._write({"ids": arguments[0][:, 0].tolist()})
            self._has_samples = True

    def _count(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        if not self._has_samples:  # an update of zero that creates the optimizer's state before it is loaded
            return
        self._has_samples = False
        number = int(next(iter(optimizer.state.values()))["step"])
        self._write({"step": number, "time": time.time()})
        if number == self._job["steps"] and self._rank == 0:
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            torch.save([each.detach().clone() for each in parameters], self._job["final"])

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._log, (json.dumps(line) + "\n").encode())


class Samples(Dataset[dict[str, Tensor]]):
    """Rows of tokens as `input_ids` and `labels`; the first token of a row is the row's number."""

    def __init__(self, job: Job) -> None:
        self._rows = numbered_rows(job["rows"], job["seq_len"], job["vocab_size"])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class Progress:
    """Number of finished steps, for `Accelerator.register_for_checkpointing`."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the number of steps."""
        self.step = state["step"]


def write_model(job: Job) -> None:
    """Write the initial model and a tokenizer with one word per token, `t0`, `t1` and so on."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(job["seed"])
    config = LlamaConfig(**job["config"], attention_dropout=job["dropout"], bos_token_id=None, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(job["model"])
    words = {f"t{number}": number for number in range(job["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    pad, end = f"t{job['vocab_size'] - 2}", f"t{job['vocab_size'] - 1}"
    wrapper: Any = PreTrainedTokenizerFast
    wrapper(tokenizer_object=tokenizer, pad_token=pad, eos_token=end, unk_token="t0").save_pretrained(job["model"])


def build_llama(job: Job) -> Any:
    """Return the initial model, ready for training."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(job["model"], dtype=torch.float32).train()


def build_optimizer(model: nn.Module, job: Job) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Return AdamW and a schedule that falls linearly to zero at the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=job["lr"], **ADAMW)
    return optimizer, LambdaLR(optimizer, lambda step: max(0.0, 1 - step / job["steps"]))


def build_sampler(job: Job, kind: Any = DistributedSampler) -> Any:
    """Return PyTorch's sampler of shuffled rows or a subclass; a step has the same samples on any number of ranks."""
    rank = int(os.environ.get("RANK", "0"))
    return kind(Samples(job), num_replicas=job["ranks"], rank=rank, shuffle=True, seed=job["seed"])


def trainer_settings(job: Job) -> dict[str, Any]:
    """Return the arguments that HF Trainer and TRL's trainers share."""
    return {
        "output_dir": job["folder"],
        "max_steps": job["steps"],
        "per_device_train_batch_size": job["batch_size"] // MAX_RANKS,
        "gradient_accumulation_steps": MAX_RANKS // job["ranks"],
        "learning_rate": job["lr"],
        "lr_scheduler_type": "linear",
        "optim": "adamw_torch",
        "adam_beta1": ADAMW["betas"][0],
        "adam_beta2": ADAMW["betas"][1],
        "weight_decay": ADAMW["weight_decay"],
        "max_grad_norm": 1.0,
        "save_strategy": "steps",
        "save_steps": job["save_every"],
        "full_determinism": True,
        "seed": job["seed"],
        "data_seed": job["seed"],
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_backend": "gloo" if job["ranks"] > 1 else None,
    }


def train_hf(job: Job) -> None:
    """Train with HF Trainer and continue with `resume_from_checkpoint=True`."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**trainer_settings(job))
    Trainer(build_llama(job), arguments, train_dataset=Samples(job)).train(resume_from_checkpoint=job["resume"])


def train_sft(job: Job) -> None:
    """Train with TRL's SFTTrainer and continue with `resume_from_checkpoint=True`."""
    from datasets import Dataset as Table
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    samples = Samples(job)
    rows = [{"input_ids": samples[index]["input_ids"].tolist()} for index in range(len(samples))]
    arguments = SFTConfig(max_length=None, gradient_checkpointing=False, bf16=False, **trainer_settings(job))
    SFTTrainer(
        model=build_llama(job),
        args=arguments,
        train_dataset=Table.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
    ).train(resume_from_checkpoint=job["resume"])


def train_grpo(job: Job) -> None:
    """Train with TRL's GRPOTrainer and continue with `resume_from_checkpoint=True`; even tokens are rewarded."""
    from datasets import Dataset as Table
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [sum(token % 2 == 0 for token in tokens) / max(1, len(tokens)) for tokens in completion_ids]

    prompts = numbered_rows(job["rows"] // NUM_GENERATIONS, job["seq_len"] // 4, job["vocab_size"]).tolist()
    arguments = GRPOConfig(
        num_generations=NUM_GENERATIONS,
        max_completion_length=job["seq_len"] // 4,
        gradient_checkpointing=False,
        bf16=False,
        **trainer_settings(job),
    )
    GRPOTrainer(
        model=build_llama(job),
        args=arguments,
        reward_funcs=reward,
        train_dataset=Table.from_list([{"prompt": " ".join(f"t{token}" for token in prompt)} for prompt in prompts]),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
    ).train(resume_from_checkpoint=job["resume"])


def train_lightning(job: Job) -> None:
    """Train with Lightning's Trainer and continue with `ckpt_path="last"`; the data loader keeps its place itself."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = build_llama(job)

        def training_step(self, microbatch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.model(**microbatch, use_cache=False).loss
            return loss

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer, scheduler = build_optimizer(self.model, job)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    lightning.seed_everything(job["seed"], verbose=False)
    saves = ModelCheckpoint(
        dirpath=job["folder"], every_n_train_steps=job["save_every"], save_top_k=-1, save_last=True, filename="{step}"
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=job["ranks"],
        strategy="ddp" if job["ranks"] > 1 else "auto",
        max_steps=job["steps"],
        gradient_clip_val=1.0,
        deterministic=True,
        use_distributed_sampler=False,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    sampler = build_sampler(job, StatefulDistributedSampler)
    loader = StatefulDataLoader(Samples(job), batch_size=job["batch_size"] // job["ranks"], sampler=sampler)
    trainer.fit(Module(), loader, ckpt_path="last" if job["resume"] else None)


def train_fabric(job: Job) -> None:
    """Train with a loop of Lightning Fabric, `fabric.save` and `fabric.load`; the loop skips batches of its epoch."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=job["ranks"], strategy="ddp" if job["ranks"] > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(job["seed"], verbose=False)
    model = build_llama(job)
    optimizer, scheduler = build_optimizer(model, job)
    model, optimizer = fabric.setup(model, optimizer)
    sampler, folder = build_sampler(job), Path(job["folder"])
    loader = DataLoader(Samples(job), batch_size=job["batch_size"] // job["ranks"], sampler=sampler)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "iteration": 0}
    if job["resume"]:
        fabric.load(max(folder.glob("*.ckpt")), state)

    def batches() -> Iterator[Any]:
        while True:
            epoch, skipped = divmod(state["iteration"], len(loader))
            sampler.set_epoch(epoch)
            for index, batch in enumerate(loader):
                if index >= skipped:
                    yield batch

    for batch in batches():
        fabric.backward(model(**batch, use_cache=False).loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state["iteration"] += 1
        if state["iteration"] % job["save_every"] == 0:
            fabric.save(folder / f"{state['iteration']:06d}.ckpt", state)
        if state["iteration"] == job["steps"]:
            return


def train_accelerate(job: Job) -> None:
    """Train with a loop of accelerate, `save_state` and `load_state` with automatic names, and `skip_first_batches`."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(project_dir=job["folder"], automatic_checkpoint_naming=True),
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=job["seed"]),
    )
    set_seed(job["seed"], deterministic=True)
    model, progress = build_llama(job), Progress()
    loader = DataLoader(Samples(job), batch_size=job["batch_size"], shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, *build_optimizer(model, job), loader)
    accelerator.register_for_checkpointing(progress)
    if job["resume"]:
        accelerator.load_state()
        accelerator.project_configuration.iteration = progress.step // job["save_every"]
    while progress.step < job["steps"]:
        epoch, skipped = divmod(progress.step, len(loader))
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
            accelerator.backward(model(**batch, use_cache=False).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.step += 1
            if progress.step % job["save_every"] == 0:
                accelerator.save_state()
            if progress.step == job["steps"]:
                break
    accelerator.end_training()


def train_foundry(job: Job) -> None:
    """Train with the command `foundry`; the same command continues."""
    options = Path(f"{job['folder']}.conf", "data")
    options.mkdir(parents=True, exist_ok=True)
    data = {"_target_": "numbered_tokens.build_numbered_tokens", "num_samples": job["rows"]}
    data |= {"seq_len": job["seq_len"], "vocab_size": job["vocab_size"]}
    (options / "numbered.yaml").write_text(json.dumps(data))
    strategy = "distributed=ddp" if job["ranks"] > 1 else "distributed=none"
    arguments = [f"--config-dir={options.parent}", "data=numbered", strategy, *job["overrides"]]
    sys.argv = ["foundry", *arguments, f"hydra.run.dir={job['folder']}"]
    runpy.run_module("foundry", run_name="__main__", alter_sys=True)


SIDES: dict[str, Callable[[Job], None]] = {
    "model": write_model,
    "foundry": train_foundry,
    "foundry_hf": train_foundry,
    "hf": train_hf,
    "lightning": train_lightning,
    "fabric": train_fabric,
    "accelerate": train_accelerate,
    "trl_sft": train_sft,
    "trl_grpo": train_grpo,
}


def main() -> None:
    """Run one side."""
    side, file = sys.argv[1:]
    job: Job = json.loads(Path(file).read_text())
    torch.set_num_threads(1)
    if side != "model":
        Intake(job)
    SIDES[side](job)


if __name__ == "__main__":
    main()
