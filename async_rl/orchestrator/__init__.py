"""The control plane: who may roll out, what is trained when, and the record of it. Pure Python, no torch."""
