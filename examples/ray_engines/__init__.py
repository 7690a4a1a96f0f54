"""Many engines on Ray: behind one route with Ray Serve, and for one dataset with Ray Data.

Used by `examples/ray_serve.py` (`application`, `client_errors`, `guard`, `replica_settings`) and by
`examples/ray_data.py` (`batch_run`, `batch_parts`). Both start Ray by `local_ray`. Copy this folder
to where your own program lies, or put it on its PYTHONPATH, under this name: Ray's processes import
it by that.
"""
