"""Asynchronous RL post-training of language models with an exact staleness bound."""
