"""A process killed during saves and deletions leaves an undamaged newest checkpoint."""

import random
import time
from itertools import count

from support.warm import CONTEXT, start_server

from foundry.checkpoint.folder import problems
from foundry.run_dir.checkpoints import find, list_checkpoints


def save_forever(run_dir, pipe, asynchronous):
    import torch
    from support.checkpoint_parts import KNOWN, saver

    torch.set_num_threads(1)
    checkpointer = saver(run_dir, asynchronous=asynchronous, keep_last=2)
    step = max((int(folder.name[5:]) for folder in list_checkpoints(run_dir)), default=0)
    while True:
        step += 1
        tensors = {f"t{index}": torch.full((2000,), float(step)) for index in range(20)}
        checkpointer.write(step, tensors=lambda given=tensors: given, manifest=KNOWN, rank_state={}, is_best=True)
        if not checkpointer.pending:
            pipe.send(step)


def test_process_killed_during_a_save_leaves_undamaged_checkpoints(tmp_path):
    start_server()
    moments = random.Random(0)
    last = 0
    for attempt in count():  # More attempts if the processes are killed before many saves.
        if attempt >= 20 and last > 40:
            break
        assert attempt < 200, last
        ours, theirs = CONTEXT.Pipe(duplex=False)
        child = CONTEXT.Process(target=save_forever, args=(tmp_path, theirs, attempt % 2 == 1), daemon=True)
        child.start()
        theirs.close()
        if attempt % 2 == 0:
            assert ours.poll(60)
        else:
            deadline = time.monotonic() + 60
            while len(list_checkpoints(tmp_path)) < 2:
                assert time.monotonic() < deadline
        time.sleep(moments.uniform(0.0, 0.1))
        child.kill()
        child.join()
        done = last
        while ours.poll():
            try:
                done = ours.recv()
            except EOFError:
                break
        newest = list_checkpoints(tmp_path)[0]
        assert int(newest.name[5:]) >= done
        assert problems(newest) == []
        assert problems(find(tmp_path)) == []
        assert problems(find(tmp_path, "best")) == []
        last = int(newest.name[5:])
