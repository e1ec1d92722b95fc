"""Everything with an optimiser or a metric: data, losses, the training loop, the stages, evaluation."""
