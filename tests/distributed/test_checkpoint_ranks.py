"""Several ranks save, fail and verify together; one process reads their checkpoints."""

import errno
import json

import pytest
from support.harness import run_ranks, spawn
from support.toy import FP32, Toy, whole_parameters

from foundry.config.schemas.distributed import DDP, FSDP, HSDP

pytestmark = pytest.mark.distributed

WRAPPERS = {"ddp": DDP(), "ddp_late": DDP(overlap_grad_reduce=False), "fsdp": FSDP(), "hsdp": HSDP()}


def saver(run_dir, world, **options):
    from support import checkpoint_parts

    return checkpoint_parts.saver(run_dir, world, **{"asynchronous": True, "strict": False} | options)


def save(checkpointer, step, tensors, world, **options):
    checkpointer.write(step, tensors=tensors, manifest={}, rank_state={"rank": world.rank}, **options)


def save_wrapped(world, root):
    import torch

    from foundry.checkpoint.tensors import collect
    from foundry.core.ema import WeightAverage
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    results = {}
    for name, config in WRAPPERS.items():
        parallel = parallelize(Toy(1), FP32, arrange(world, config), grad_checkpointing=False, torchcompile=False)
        ema = WeightAverage(parallel.inner, 0.9)
        with torch.no_grad():
            for parameter in parallel.inner.parameters():
                parameter.mul_(1.5)
        ema.update()
        save(saver(root / name, world), 3, lambda: collect(parallel.model, ema, []), world, wait=True)  # noqa: B023
        with ema.swapped_in():
            averaged = whole_parameters(parallel)
        results[name] = whole_parameters(parallel), averaged
    return results


def test_checkpoint_of_two_ranks_loads_on_one_process(tmp_path):
    import torch

    from foundry.checkpoint.tensors import load_weights
    from foundry.run_dir.checkpoints import find

    for name, (own, averaged) in run_ranks(save_wrapped, 2, tmp_path)[0].items():
        folder = find(tmp_path / name)
        ranks = [json.loads((folder / f"rank-0000{rank}.json").read_text()) for rank in (0, 1)]
        assert ranks == [{"rank": 0}, {"rank": 1}]
        for ema, expected in ((False, own), (True, averaged)):
            model = Toy(2)
            load_weights(folder, model, ema=ema)
            assert model.head.weight is model.embedding.weight
            for key, parameter in model.named_parameters():
                assert torch.equal(parameter, expected[key]), (name, ema, key)
        assert not torch.equal(own["embedding.weight"], averaged["embedding.weight"])


def save_beside_training(world, run_dir):
    import torch

    checkpointer = saver(run_dir, world, keep_last=2)
    total = 0.0
    for step in range(1, 11):
        save(checkpointer, step, lambda: {"a": torch.full((100_000,), float(step))}, world)  # noqa: B023
        for _ in range(50):
            total += world.all_reduce_sum(torch.ones(10)).sum().item()
    checkpointer.finish()
    return total, checkpointer.failed_saves


@pytest.mark.long
def test_collectives_of_training_continue_during_a_save(tmp_path):
    from foundry.checkpoint.folder import problems
    from foundry.run_dir.checkpoints import list_checkpoints

    assert run_ranks(save_beside_training, 4, tmp_path) == [(10 * 50 * 10 * 4, 0)] * 4
    assert [folder.name[-2:] for folder in list_checkpoints(tmp_path)] == ["10", "09"]
    assert [problems(folder) for folder in list_checkpoints(tmp_path)] == [[], []]


def fail_on_one_rank(world, run_dir, asynchronous, strict):
    import torch

    from foundry.checkpoint import writer as module
    from foundry.core.protocols import SaveError

    checkpointer = saver(run_dir, world, asynchronous=asynchronous, strict=strict)
    tensors = {"a": torch.arange(10.0), "b": torch.arange(9.0)}
    save(checkpointer, 1, lambda: tensors, world)
    checkpointer.finish()
    working = module.write_shard

    def failing(path, chunks, alive):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    if world.rank == 1:
        module.write_shard = failing
    try:
        save(checkpointer, 2, lambda: tensors, world)
        if strict:
            checkpointer.finish()
        checkpointer.join()
        raised = ""
    except SaveError as error:
        raised = str(error)
    module.write_shard = working
    failed = checkpointer.failed_saves
    there = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    world.barrier()
    save(checkpointer, 3, lambda: tensors, world)
    checkpointer.finish()
    return failed, there, raised


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_save_error_on_one_rank_is_reported_on_all_ranks(tmp_path, asynchronous, strict):
    from foundry.checkpoint.folder import problems
    from foundry.run_dir.checkpoints import find

    results = run_ranks(fail_on_one_rank, 2, tmp_path, asynchronous, strict)
    for failed, _, raised in results:
        assert failed == 1
        assert ("rank 1: OSError: [Errno 28] No space left on device" in raised) is strict
    assert results[0][1] == ["latest", "step_00000001"]
    assert find(tmp_path).name == "step_00000003"
    assert problems(find(tmp_path)) == []


def verify(world, run_dir):
    import logging

    from foundry.checkpoint.verification import verify_newest

    message = []
    handler = logging.Handler()
    handler.emit = lambda record: message.append(record.getMessage())
    logging.getLogger("foundry").addHandler(handler)
    return verify_newest(run_dir, world), message


def save_three(world, run_dir):
    import torch

    checkpointer = saver(run_dir, world, asynchronous=False)
    for step in (1, 2, 3):
        save(checkpointer, step, lambda: {"a": torch.arange(10.0), "b": torch.arange(9.0)}, world)


def test_ranks_agree_on_the_newest_undamaged_checkpoint(tmp_path):
    spawn(save_three, 3, tmp_path)
    folders = [tmp_path / "checkpoints" / f"step_0000000{step}" for step in (1, 2, 3)]
    (folders[2] / "rank-00002.json").unlink()
    content = bytearray((folders[1] / "shard-00001.safetensors").read_bytes())
    content[-1] ^= 1
    (folders[1] / "shard-00001.safetensors").write_bytes(content)
    results = run_ranks(verify, 2, tmp_path)
    assert [found for found, _ in results] == [folders[0]] * 2
    assert results[1][1] == []
    newest, second = results[0][1]
    assert f"{folders[2]} is damaged and not used: rank-00002.json is missing" in newest
    assert "shard-00001.safetensors has the checksum" in second


def collect_odd_state(world):
    import torch

    from foundry.checkpoint.folder import CheckpointError
    from foundry.checkpoint.tensors import collect
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    parallel = parallelize(Toy(1), FP32, arrange(world, FSDP()), grad_checkpointing=False, torchcompile=False)
    optimizer = torch.optim.SGD(parallel.model.parameters(), lr=0.1)
    optimizer.state[parallel.inner.embedding.weight]["rows"] = torch.zeros(29)
    try:
        collect(parallel.model, None, [optimizer])
    except CheckpointError as error:
        return str(error)


def test_optimizer_state_of_an_unexpected_shape_is_refused():
    for message in run_ranks(collect_odd_state, 2):
        assert "optimizer.embedding.weight.rows has the shape (29,) for a sharded parameter of (29, 12)" in message
