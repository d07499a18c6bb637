"""The main job from end to end, on a real checkpoint. Run as `python -m demo`, or `make demo`."""
