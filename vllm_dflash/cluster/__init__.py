"""Engines on Ray.

One engine over many nodes: `ray_executor`, `ray_worker`, what they ask of `nodes` and where they
place workers (`placement`). Many engines: behind one route (`replicas/`), over one dataset
(`batch_run`, `batch_parts`), on one machine (`local_ray`).
"""
