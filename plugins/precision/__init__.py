"""Precision plugins go here, one file each: subclasses of Lightning's ``Precision``.

The experts' products pass through one function, ``olmoe_lightning.kernels.grouped_mm``.
"""
