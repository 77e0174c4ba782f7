"""Mechanics of training in several processes: mesh, collectives, flat buffers, sharded optimizer. No Lightning here."""

from olmoe_lightning.parallel.mesh import Axis, Mesh, MeshShape

__all__ = ["Axis", "Mesh", "MeshShape"]
