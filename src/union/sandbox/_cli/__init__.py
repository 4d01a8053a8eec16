"""``sbx``, the human's tool: the session API at the prompt of a terminal."""
