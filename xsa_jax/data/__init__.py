"""Text files -> tokens -> token store -> batches. Nothing in this package imports jax.

`text` reads documents, and `tokenizer` turns them into ids. `prepare` makes a token store of them: `convert` handles one input
file, `pool` distributes the files over worker processes, and `progress` reports. `store` reads the `shard`s of a store at random
positions, and `loader` serves shuffled batches. `spawn` keeps jax out of worker processes. `python_text` builds a demo corpus.
"""
