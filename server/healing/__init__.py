"""Backend processes: what is seen of them from outside, and how a model of which one died is brought back."""
