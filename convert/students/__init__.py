"""Students: config and model of each kind."""
