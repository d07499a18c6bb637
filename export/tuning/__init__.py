"""How a published model is best served on this machine: found by serving it in many ways, and measuring each."""
