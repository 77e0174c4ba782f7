"""Communication plugins go here, one file each: how tokens reach the experts of other processes.

Inside one process the experts are reached by ``LocalTransport`` of ``olmoe_lightning/model/moe.py``; a plugin offers
the same two calls, ``dispatch`` and ``combine``.
"""
