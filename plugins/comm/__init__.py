"""Communication plugins, one file each: how tokens reach the experts of other processes.

``base`` says what a plugin is, ``registry`` finds it by name, ``conformance`` checks one, ours or a third party's.
"""

from olmoe_lightning.plugins.comm.all_to_all import AllToAllComm
from olmoe_lightning.plugins.comm.base import CommPlugin, CommSpec
from olmoe_lightning.plugins.comm.capacity import DropCounters
from olmoe_lightning.plugins.comm.local import LocalComm
from olmoe_lightning.plugins.comm.registry import describe_choice, known_names, make_comm
from olmoe_lightning.plugins.comm.rowwise import RowwiseComm

__all__ = [
    "AllToAllComm",
    "CommPlugin",
    "CommSpec",
    "DropCounters",
    "LocalComm",
    "RowwiseComm",
    "describe_choice",
    "known_names",
    "make_comm",
]
