"""Rehearsal of a run: `foundry.engine.train.train` with fake CUDA tensors and fake ranks, without a GPU."""
