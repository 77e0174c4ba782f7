"""The rows of the contract; to import this package is to fill the table."""

from features import callbacks, checkpoints, data, logging, loops, modules, optimizers, trainers  # noqa: F401
