"""Defaults of a comparison; imports nothing, for the command line."""

TOKENS = 32
MAX_MODEL_LEN = 2048
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest relative error that counts as equal, by dtype."""
BUILT_IN_PROMPTS = (
    "The three laws of motion, in the words of a physics teacher: first,",
    "def read_lines(path):\n"
    '    """Return the lines of a text file without their ends."""\n'
    "    lines = []\n"
    "    with open(path) as file:\n"
    "        for line in file:\n",
    "class Stack:\n"
    '    """A stack of objects: the last one pushed is the first one popped."""\n\n'
    "    def __init__(self, items=()):\n"
    "        self._items = list(items)\n\n"
    "    def push(self, item):\n"
    "        self._items.append(item)\n\n"
    "    def pop(self):\n"
    "        if not self._items:\n"
    '            raise IndexError("pop from an empty stack")\n'
    "        return self._items.pop()\n\n"
    "    def __len__(self):\n",
)
"""Short and longer ones, so that context is stored over several cache blocks."""
