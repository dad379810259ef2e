"""What a model is measured by during a run: parts that every rank calls at an evaluation."""
