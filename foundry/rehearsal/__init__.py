"""A run on GPUs that do not exist: `foundry.engine.train.train` with fake CUDA tensors and fake ranks."""
