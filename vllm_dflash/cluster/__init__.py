"""Workers on the nodes of a Ray cluster: what the nodes must have, and what they give."""
