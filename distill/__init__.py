"""Everything with an optimiser or a metric: data, losses, training, stages, evaluation."""
