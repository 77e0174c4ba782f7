"""The parts that the strategy and the module are composed of; each takes what it needs, never the strategy."""
