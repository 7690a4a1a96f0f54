"""Engines on Ray.

One engine over many nodes: `ray_executor`, `ray_worker`, what they ask of `nodes` and where they
place workers (`placement`). Many engines: behind one route (`replicas/`), over one dataset
(`batches/`), on one machine (`shared_machine`, `local_ray`).
"""
