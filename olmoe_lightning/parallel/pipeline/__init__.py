"""Layers cut into stages: which process has which, and the schedules that run them."""
