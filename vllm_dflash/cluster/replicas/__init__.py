"""Several engines behind one OpenAI-compatible route, with Ray Serve (`examples/ray_serve.py`)."""
