"""Objectives: the losses of training, one module each."""
