"""Constraints of tensor parallelism are checked at composition time."""

import pytest
from support.composition import compose, configure

from foundry.core.errors import ConfigError

TWO = ["distributed=fsdp", "distributed.tensor_parallel=2", "distributed.nproc_per_node=4", "data.vocab_size=300"]
KEY = "distributed.tensor_parallel"


def test_tensor_parallel_sets_mesh_shape_and_dp_size():
    config = configure(*TWO, "hparams.global_batch_size=16", "hparams.per_gpu_batch_size=4")
    assert config.distributed.dp_size(4) == 2
    assert config.hparams.accum_freq == 2
    assert config.distributed.mesh_shape(4) == {"shard": 2, "tensor": 2}
    hsdp = configure(*TWO, "distributed=hsdp", "distributed.nproc_per_node=8", "hparams.global_batch_size=16")
    assert hsdp.distributed.mesh_shape(8) == {"replicate": 2, "shard": 2, "tensor": 2}
    assert configure("distributed=fsdp").distributed.mesh_shape(4) == {"shard": 4}


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["model.num_heads=4", "model.num_kv_heads=1"], "model.num_kv_heads", "is 1 but must be a multiple of"),
        (["model.hidden_size=12", "model.num_heads=3", "model.num_kv_heads=3"], "model.num_heads", "is 3 but must be"),
        (["model.intermediate_size=705"], "model.intermediate_size", "the next is 706"),
        (["data.vocab_size=301"], "model.vocab_size", "is 301 but must be a multiple of distributed.tensor_parallel=2"),
        (["distributed.nproc_per_node=3"], KEY, "is 2 but must divide the 3 ranks"),
        (["distributed.nproc_per_node=1"], KEY, "is 2 but must divide the 1 rank"),
        (["distributed=hsdp", "distributed.nproc_per_node=6"], "distributed.num_replicas", "the 3 groups of ranks"),
        (["distributed=ddp"], KEY, "set shard_optimizer=true, or choose distributed=fsdp"),
        (["distributed=none"], "distributed", "but 4 processes train together"),
        (["model=hf_llama"], KEY, "choose model=transformer"),
        (["hparams=diffusion"], KEY, "but model DiT does not support tensor parallelism; set it to 1"),
        (["peft=lora"], KEY, "adapters of peft=lora do not support tensor parallelism; set it to 1"),
        (
            ["objective=sft", "data=chats", f"data.path={__file__}", "objective.attention_dropout=0.1"],
            "objective.attention_dropout",
            "to 0",
        ),
        (
            ["hparams.torchcompile=true", "hparams.grad_checkpointing=true"],
            "hparams.grad_checkpointing_policy",
            "select",
        ),
        (["distributed.tensor_parallel=0"], KEY, "at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_tensor_parallel_settings_name_key_and_remedy(overrides, key, words):
    with pytest.raises(ConfigError) as error:
        compose(*TWO, *overrides)
    lines = [line for line in str(error.value).splitlines() if line.startswith(f"{key}: ") and words in line]
    assert len(lines) == 1, error.value


def test_ddp_with_a_sharded_optimizer_allows_tensor_parallel():
    config = configure(*TWO, "distributed=ddp", "distributed.shard_optimizer=true")
    assert config.distributed.mesh_shape(4) == {"shard": 2, "tensor": 2}
