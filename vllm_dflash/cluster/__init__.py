"""Engines on Ray.

One engine on many nodes: `ray_executor` and `ray_worker`, the checks of each node (`nodes`) and the
placement of workers (`placement`). Many engines: behind one route (`replicas/`), for one dataset
(`batch_run`, `batch_parts`), on one machine (`local_ray`).
"""
