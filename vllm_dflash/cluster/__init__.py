"""One engine on many nodes of a Ray cluster.

`ray_executor` and `ray_worker` run it; `nodes` checks each node, `placement` places the workers.
Many engines on Ray are examples (`examples/ray_engines`).
"""
