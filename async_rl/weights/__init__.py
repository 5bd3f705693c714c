"""How weights get from the trainer to an engine."""
