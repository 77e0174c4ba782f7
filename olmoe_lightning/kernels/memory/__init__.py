"""Symmetric memory: the same regions on every process, each reachable by all; and the allocator of the CPU."""
