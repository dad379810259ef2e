"""A run on GPUs that do not exist: `foundry.engine.train.train` as it is, with fake CUDA tensors and fake ranks."""
